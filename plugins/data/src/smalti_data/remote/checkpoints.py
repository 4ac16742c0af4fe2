"""The checkpoints of a run in a storage. It has the layout of a run directory: `checkpoints/step-00000500/manifest.json`, ...

What is read is what is asked for: a listing reads manifests, an inspection also the headers of tensors. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from smalti import CheckpointError, UserError
from smalti.checkpoint import (
    MANIFEST,
    RANKING,
    STATE,
    SUSPECT,
    Chunk,
    FileRecord,
    Manifest,
    StoredTensor,
    assemble_tensors,
    decode_layout,
    decode_manifest,
    decode_ranking,
    decode_state,
    find_inconsistencies,
    is_ignored,
    new_digest,
    parse_checkpoint_name,
)
from smalti.data import IntegrityError, MissingFileError, Storage

CHECKPOINTS = "checkpoints"
THREADS = 4
"""Files that are read at a time."""
BLOCK = 8 * 2**20
"""Bytes in a request for a part of a file. With `THREADS`, the memory that reading takes."""
_HEADER = 2**16
"""Bytes in the first request for the header of a file of tensors."""

UNUSABLE = (CheckpointError, MissingFileError, IntegrityError)
"""What reading a damaged checkpoint raises. All other errors say nothing about it, such as a server that does not answer."""

_READS = 3
"""Reads of a file before it counts as damaged."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """One directory of a checkpoint. `sizes` are those of its files; `prefix` is what their keys begin with."""

    name: str
    step: int
    revision: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    folder: str = f"{CHECKPOINTS}/"

    @property
    def published(self) -> bool:
        """Whether its manifest is there, which was written last."""
        return MANIFEST in self.sizes

    @property
    def prefix(self) -> str:
        return f"{self.folder}{self.name}/"


class RemoteRun:
    """The checkpoints of a run in a storage, for reading. Thread-safe, like its storage.

    `folder` is where they are, and `only` the name of one of them, if the others do not matter.
    """

    def __init__(self, storage: Storage, *, folder: str = f"{CHECKPOINTS}/", only: str = "") -> None:
        self.storage = storage
        self.only = only
        self._folder = folder

    @property
    def location(self) -> str:
        return self.storage.location

    def all(self) -> list[RemoteCheckpoint]:
        """Every directory of a checkpoint, published or not, lowest step first. Reads no file."""
        found: dict[str, dict[str, int]] = {}
        for stored in self.storage.list(f"{self._folder}{self.only}/" if self.only else self._folder):
            name, _, file = stored.key.removeprefix(self._folder).partition("/")
            if file:
                found.setdefault(name, {})[file] = stored.size
        places = [(place, name) for name in found if (place := parse_checkpoint_name(name)) is not None]
        return [
            RemoteCheckpoint(name=name, step=step, revision=revision, sizes=found[name], folder=self._folder)
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

        with ThreadPoolExecutor(THREADS, "smalti-remote") as pool:
            return tuple(filter(None, pool.map(check, sorted(manifest.files))))

    def verify(self, checkpoint: RemoteCheckpoint) -> tuple[str, ...]:
        """As `problems`, and that there are no other files, and that state.json and the headers of tensors are consistent."""
        if found := self.problems(checkpoint):
            return found
        manifest = self.manifest(checkpoint)
        others = sorted(
            name
            for name in checkpoint.sizes.keys() - manifest.files.keys() - {MANIFEST}
            if not is_ignored(name.rpartition("/")[2])
        )
        if others:
            return tuple(f"{name} is not in the manifest" for name in others)

        def tensors(group: str) -> Mapping[str, StoredTensor]:
            return self.tensors(checkpoint, manifest, group)

        state = self.storage.read(checkpoint.prefix + STATE)
        inconsistent = find_inconsistencies(manifest, lambda: decode_state(state, STATE), tensors)
        return tuple(f"{name} {problem}" for name, problem in inconsistent.items())

    def tensors(self, checkpoint: RemoteCheckpoint, manifest: Manifest, group: str) -> dict[str, StoredTensor]:
        """The tensors of a group by name. Reads headers of files. Raises CheckpointError if they cannot be assembled."""
        names = [name for name in sorted(manifest.files) if name.startswith(f"{group}/") and name.endswith(".safetensors")]

        def layout(name: str) -> Mapping[str, tuple[Chunk, int]]:
            key, size = checkpoint.prefix + name, manifest.files[name].size
            first = self.storage.read_range(key, 0, min(_HEADER, size))

            def read(start: int, length: int) -> bytes:
                if start + length <= len(first):
                    return first[start : start + length]
                rest = max(start, len(first))
                return first[start:] + self.storage.read_range(key, rest, start + length - rest)

            try:
                return decode_layout(read, size)
            except CheckpointError as error:
                raise CheckpointError(f"{name} {error.message}") from error

        with ThreadPoolExecutor(THREADS, "smalti-remote") as pool:
            found = dict(zip(names, pool.map(layout, names), strict=True))
        return assemble_tensors(names, found.__getitem__)

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

    def ranked(self) -> tuple[list[RemoteCheckpoint], int]:
        """The checkpoints that were evaluated, the best first, without suspect ones, and how many are to be kept.

        Raises CheckpointError if the ranking is damaged.
        """
        try:
            steps, keep = decode_ranking(self.storage.read(self._folder + RANKING), self.location)
        except MissingFileError:
            return [], 0
        there = {each.step: each for each in self.published()}
        return [there[step] for step in steps if step in there and not self.is_suspect(there[step])], keep

    def find(self, choice: str) -> Iterator[RemoteCheckpoint]:
        """The checkpoints that `choice` means, the preferred one first: "latest", "best", a step, or the name of a checkpoint.

        "latest" may yield none; suspect ones come after all others. Raises UserError if the chosen one is not there.
        """
        if choice == "best":
            ranked, _ = self.ranked()
            if not ranked:
                raise UserError(f"no checkpoint in {self.location} was evaluated", fix='name a step, or "latest"')
            yield from ranked
            return
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
            return
        suspect = []
        for each in published:
            if self.is_suspect(each):
                suspect.append(each)
            else:
                yield each
        yield from suspect

    def is_suspect(self, checkpoint: RemoteCheckpoint) -> bool:
        """Whether it was saved after a fault that may have changed it. Reads the manifest; False if that cannot be used."""
        try:
            return SUSPECT in self.manifest(checkpoint).flags
        except UNUSABLE:
            return False
