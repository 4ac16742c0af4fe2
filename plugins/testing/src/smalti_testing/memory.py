"""A storage in memory: for tests that need one, and the shortest storage that keeps the contract. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from smalti.data import MissingFileError, Storage, StoredFile, checked_key


class MemoryStorage(Storage):
    """Files in a dictionary, its own."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self._files = {checked_key(key): data for key, data in (files or {}).items()}

    @property
    def location(self) -> str:
        return "memory"

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        for key in sorted(self._files):
            if key.startswith(prefix) and key > after:
                yield self.stat(key)

    def stat(self, key: str) -> StoredFile:
        data = self.read(key)
        return StoredFile(key=key, size=len(data), etag=hashlib.sha256(data).hexdigest()[:16])

    def read(self, key: str) -> bytes:
        try:
            return self._files[checked_key(key)]
        except KeyError:
            raise MissingFileError(f"{self.location}: no file {key!r}", fix="write it first") from None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.read(key)[start : start + length]

    def write(self, key: str, data: bytes) -> None:
        self._files[checked_key(key)] = bytes(data)
