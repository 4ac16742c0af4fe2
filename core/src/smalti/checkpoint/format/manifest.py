"""The manifest: the commit record of a checkpoint. It is written last; without a valid one there is no checkpoint.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from smalti.errors import CheckpointError
from smalti.system import parse_json

MANIFEST = "manifest.json"
STATE = "state.json"
GROUPS = ("model", "optimizer", "ema")
"""The directories of a checkpoint that hold tensors."""
WEIGHTS = "weights"
"""The directory of a checkpoint that holds a copy of the model's tensors for other tools, if that was requested."""
SUSPECT = "suspect"
"""Flag of a checkpoint that was saved after a hardware fault: it does not count for the limit on checkpoints."""

_FORMAT = "smalti-checkpoint"
_VERSION = 2
_READABLE_VERSIONS = (1, 2)
"""Version 1 had SHA-256 of files only."""
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_FILE = re.compile(rf"{re.escape(STATE)}|(?:{'|'.join(GROUPS)})/{_NAME}\.safetensors|{WEIGHTS}/{_NAME}\.(?:safetensors|json)")
_KEYS = frozenset(
    ("format", "version", "step", "world_size", "created", "plugins", "config_digest", "flags", "files", "sha256")
)
ALGORITHMS = ("blake3", "sha256")
"""Digest algorithms; new files use the first."""
_MAX_SIZE = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint: its size in bytes, and its digest of 32 bytes in hexadecimal, by one of the `ALGORITHMS`."""

    size: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    algorithm: str = ALGORITHMS[0]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and where it came from.

    `files` maps names relative to the checkpoint ("model/rank-00000-part-00000.safetensors") to their records; other files
    are not part of the checkpoint. `created` is UTC in ISO 8601, for information only: the order is that of the steps.
    """

    step: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    files: Mapping[str, FileRecord]
    created: str = ""
    plugins: tuple[str, ...] = ()
    config_digest: str = ""
    flags: tuple[str, ...] = field(default=())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def holds_the_same_as(self, other: Manifest) -> bool:
        """Whether the two are equal except for `created`."""
        return replace(self, created="") == replace(other, created="")

    def encode(self) -> bytes:
        """Returns the contents of manifest.json. The last key is the digest of all others."""
        body: dict[str, object] = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "created": self.created,
            "plugins": list(self.plugins),
            "config_digest": self.config_digest,
            "flags": list(self.flags),
            "files": {
                name: {"size": record.size, record.algorithm: record.digest} for name, record in sorted(self.files.items())
            },
        }
        return json.dumps(body | {"sha256": _digest(body)}, indent=1, ensure_ascii=False).encode() + b"\n"


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(checkpoint: Path) -> Manifest:
    """Returns the manifest of a checkpoint directory, verified by its own digest. Raises CheckpointError with the reason.

    Does not check the files that it lists: see `smalti.checkpoint.format.verification`.
    """
    path = checkpoint / MANIFEST
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CheckpointError(f"{MANIFEST} is {kind}")
        if status.st_size > _MAX_SIZE:
            raise CheckpointError(f"{MANIFEST} is too large for a manifest")
        return decode_manifest(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing: the save was not finished, or the file was removed") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error


def decode_manifest(data: bytes) -> Manifest:
    """Parses the contents of a manifest.json. Raises CheckpointError for anything that `encode` does not write."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CheckpointError(f"{MANIFEST} is not the manifest of a smalti checkpoint")
    version = body.get("version")
    if type(version) is not int or version not in _READABLE_VERSIONS:
        versions = " and ".join(map(str, _READABLE_VERSIONS))
        raise CheckpointError(f"{MANIFEST} has format version {version!r}; this smalti reads versions {versions}")
    if body.keys() != _KEYS:
        names = ", ".join(sorted(body.keys() ^ _KEYS))
        raise CheckpointError(f"{MANIFEST} is damaged: missing or unknown keys: {names}")
    if body.pop("sha256") != _digest(body):
        raise CheckpointError(f"{MANIFEST} does not match its own digest: damaged or edited")
    try:
        return _MANIFEST.validate_json(json.dumps(body | {"files": _files(body["files"])}), strict=True)
    except ValidationError as error:
        raise _invalid(".".join(map(str, error.errors()[0]["loc"]))) from None


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _files(value: object) -> dict[str, dict[str, object]]:
    """The records of files, with the name of the algorithm beside the digest. Raises CheckpointError for a wrong name."""
    if not isinstance(value, dict):
        raise _invalid("files")
    if STATE not in value:
        raise CheckpointError(f"{MANIFEST} does not list {STATE}")
    records = {}
    for name, record in value.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{MANIFEST} lists {name!r}, which is not a file of a checkpoint")
        algorithm = next((key for key in ALGORITHMS if isinstance(record, dict) and record.keys() == {"size", key}), None)
        if algorithm is None:
            raise _invalid(f"files.{name}")
        records[name] = {"size": record["size"], "digest": record[algorithm], "algorithm": algorithm}
    return records


def _invalid(key: str) -> CheckpointError:
    return CheckpointError(f"{MANIFEST} is damaged: {key} has an invalid value")
