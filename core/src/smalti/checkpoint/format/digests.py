"""Files and their digests: taken as a file is written, so that nothing has to be read again, and compared when it is read.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from smalti.checkpoint.format.manifest import ALGORITHMS, FileRecord
from smalti.system import files, note_progress

_BLOCK = 4 * 2**20
_PIECE = 2**18
"""Small enough to stay in the processor's cache."""


class _Digest(Protocol):
    def update(self, data: files.Block, /) -> object: ...

    def hexdigest(self) -> str: ...


def write_with_digest(path: Path, contents: Iterable[files.Block]) -> FileRecord:
    """A new file with these contents, synced; what the manifest says about it. Takes blocks of any size."""
    digest = _new_digest(ALGORITHMS[0])
    with files.create(path) as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # what was hashed is still in the processor's cache when written
                block = data[start : start + _BLOCK]
                digest.update(block)
                files.write(file, block)
                note_progress()
        files.sync(file)
        return FileRecord(size=file.tell(), digest=digest.hexdigest())


def matches(path: Path, record: FileRecord) -> bool:
    """Whether a file has the contents that were recorded. Reads it without the interpreter lock, so threads help."""
    digest, room = _new_digest(record.algorithm), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            digest.update(room[:count])
            note_progress()
    return digest.hexdigest() == record.digest


def _new_digest(algorithm: str) -> _Digest:
    return blake3() if algorithm == "blake3" else hashlib.new(algorithm)
