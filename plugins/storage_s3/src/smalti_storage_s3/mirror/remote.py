"""A mirror: the copy of a run in a storage. It has the layout of the run directory, so a copy of all files is a run directory.

    checkpoints/step-00000500/model/...     as in the run directory
    checkpoints/step-00000500/.claim.json   which contents this name belongs to: created once, before any other file
    checkpoints/step-00000500/manifest.json created once, after all other files: without it there is no checkpoint
    run.json, config.toml, launch.json, events.jsonl, data/trained/...   what a resume elsewhere needs
    mirror.json                             the run that the mirror belongs to: created once
    launches/00000003.json                  the launches of the run, each created once; only the last one writes

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from smalti import CheckpointError, UserError
from smalti.checkpoint import MANIFEST, FileRecord, Manifest, decode_manifest, new_digest, parse_checkpoint_name
from smalti.data import IntegrityError, MissingFileError, Storage

CHECKPOINTS = "checkpoints"
CLAIM = ".claim.json"
THREADS = 4
"""Files that are read at a time."""
TRANSFERS = 2
"""Files that are sent or downloaded at a time: each takes several connections, and the memory of several parts."""
BLOCK = 8 * 2**20
"""Bytes in a request for a part of a file. With `THREADS`, the memory that reading takes."""

UNUSABLE = (CheckpointError, MissingFileError, IntegrityError)
"""What reading a damaged checkpoint raises. All other errors say nothing about it, such as a server that does not answer."""

_READS = 3
"""Reads of a file before it counts as damaged."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """One directory of a checkpoint in a mirror. `sizes` are those of its files there."""

    name: str
    step: int
    revision: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def published(self) -> bool:
        """Whether its manifest is there, which was written last."""
        return MANIFEST in self.sizes

    @property
    def prefix(self) -> str:
        return f"{CHECKPOINTS}/{self.name}/"


class Mirror:
    """The checkpoints of a mirror, for reading. Thread-safe, like its storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def location(self) -> str:
        return self.storage.location

    def all(self) -> list[RemoteCheckpoint]:
        """Every directory of a checkpoint, published or not, lowest step first. Reads no file."""
        found: dict[str, dict[str, int]] = {}
        for stored in self.storage.list(f"{CHECKPOINTS}/"):
            name, _, file = stored.key.removeprefix(f"{CHECKPOINTS}/").partition("/")
            if file:
                found.setdefault(name, {})[file] = stored.size
        places = [(place, name) for name in found if (place := parse_checkpoint_name(name)) is not None]
        return [
            RemoteCheckpoint(name=name, step=step, revision=revision, sizes=found[name])
            for (step, revision), name in sorted(places)
        ]

    def published(self) -> list[RemoteCheckpoint]:
        """The checkpoints with a manifest, lowest step first."""
        return [each for each in self.all() if each.published]

    def manifest(self, checkpoint: RemoteCheckpoint) -> Manifest:
        """Raises CheckpointError if it cannot be used, or if files are missing or have other sizes."""
        manifest = decode_manifest(self.storage.read(checkpoint.prefix + MANIFEST))
        for name, record in sorted(manifest.files.items()):
            size = checkpoint.sizes.get(name)
            if size != record.size:
                there = "is missing" if size is None else f"has {size} bytes where the manifest says {record.size}"
                raise CheckpointError(f"{name} {there}")
        if manifest.step != checkpoint.step:
            raise CheckpointError(f"{MANIFEST} is of step {manifest.step}, which is not the step in the directory name")
        return manifest

    def problems(self, checkpoint: RemoteCheckpoint) -> tuple[str, ...]:
        """Read every byte of a checkpoint and compare the digests. Returns what is wrong, as sentences."""
        try:
            manifest = self.manifest(checkpoint)
        except UNUSABLE as error:
            return (error.message,)

        def check(name: str) -> str:
            for _ in range(_READS):  # a bit that the network has changed is another one next time
                if self.digest(checkpoint.prefix + name, manifest.files[name]) == manifest.files[name].digest:
                    return ""
            return f"{name} does not match its digest: damaged or edited"

        with ThreadPoolExecutor(THREADS, "smalti-mirror") as pool:
            return tuple(filter(None, pool.map(check, sorted(manifest.files))))

    def digest(self, key: str, record: FileRecord) -> str:
        """The digest of a file, read in parts by the algorithm of `record`; "" if it is missing or shorter."""
        digest = new_digest(record.algorithm)
        for start in range(0, record.size, BLOCK):
            try:
                part = self.storage.read_range(key, start, min(BLOCK, record.size - start))
            except (MissingFileError, IntegrityError):
                return ""
            digest.update(part)
        return digest.hexdigest()

    def find(self, choice: str) -> Iterator[RemoteCheckpoint]:
        """The checkpoints that `choice` means, the preferred one first: "latest", a step, or the name of a checkpoint.

        Raises UserError if there is none.
        """
        published = self.published()[::-1]
        word = choice.removeprefix("step-")
        if choice != "latest":
            place = parse_checkpoint_name(choice)
            step = int(word) if place is None and word.isdecimal() else None
            known = ", ".join(each.name for each in reversed(published)) or "none"
            published = [each for each in published if each.step == step or (each.step, each.revision) == place]
            if not published:
                raise UserError(f"there is no checkpoint {choice} in {self.location}", fix=f"there are: {known}")
        yield from published
