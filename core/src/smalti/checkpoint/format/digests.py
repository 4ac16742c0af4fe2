"""Digests of files: computed while a file is written, and compared when it is read.

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
_BUFFER_SIZE = 2**18
"""Bytes; small enough to stay in the cache of the CPU."""


class _Digest(Protocol):
    def update(self, data: files.Block, /) -> object: ...

    def hexdigest(self) -> str: ...


def write_with_digest(path: Path, contents: Iterable[files.Block]) -> FileRecord:
    """Write a new file with these contents, in blocks of any size, and sync it; returns its record for the manifest."""
    digest = new_digest(ALGORITHMS[0])
    with files.create(path) as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # a hashed block is still in the cache of the CPU when it is written
                block = data[start : start + _BLOCK]
                digest.update(block)
                files.write(file, block)
                note_progress()
        files.sync(file)
        return FileRecord(size=file.tell(), digest=digest.hexdigest())


def matches(path: Path, record: FileRecord) -> bool:
    """Whether a file has the recorded digest. Reads and hashes without the interpreter lock, so threads run in parallel."""
    digest, buffer = new_digest(record.algorithm), memoryview(bytearray(_BUFFER_SIZE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            note_progress()
    return digest.hexdigest() == record.digest


def new_digest(algorithm: str) -> _Digest:
    """An empty digest by one of the `ALGORITHMS`, for contents that are read in pieces."""
    return blake3() if algorithm == "blake3" else hashlib.new(algorithm)
