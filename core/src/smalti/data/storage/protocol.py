"""Where datasets and caches live: a flat, sorted space of keys with bytes behind them.

A key is a relative path with "/" between its parts, such as "cats/0001.png". Keys that could leave the root (absolute ones,
"..", empty parts) are refused with `InvalidKeyError`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from smalti.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file of a storage. `size` is in bytes; `etag` changes whenever the content may have changed."""

    key: str
    size: int
    etag: str


class StorageError(UserError):
    """A file cannot be read or written. Unless it is a `TransientStorageError`, trying again will not help."""


class MissingFileError(StorageError):
    """There is no such file (or no such root)."""


class AccessDeniedError(StorageError):
    """The file is there, but this user may not read or write it."""


class InvalidKeyError(StorageError):
    """A key that is not a plain relative path."""


class TransientStorageError(StorageError):
    """The storage did not answer. It says nothing about the file: never a reason to give a sample up.

    A storage retries by itself; one that raises this has tried for as long as it should.
    """


class Storage(Protocol):
    """What a dataset needs of a file system or an object store. Every method may be called from several threads at once."""

    @property
    def location(self) -> str:
        """Where this is, for messages: a path or an address."""
        ...

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """All files whose key starts with `prefix` (plain text, not a folder), sorted by key, one at a time."""
        ...

    def stat(self, key: str) -> StoredFile:
        """Size and etag of one file. Raises MissingFileError."""
        ...

    def read(self, key: str) -> bytes:
        """The whole file. Raises MissingFileError."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from offset `start`; fewer at the end of the file. Raises MissingFileError."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Put a file in place, whole or not at all: a reader sees the old content or the new one."""
        ...


def checked_key(key: str) -> str:
    """`key` itself if it is a plain relative path; raises InvalidKeyError otherwise."""
    if "\\" in key:
        message = f"not a valid file name: {key!r} has a backslash, or a byte that is not UTF-8"
        raise InvalidKeyError(message, fix="rename the file")
    if key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidKeyError(
            f"not a valid key: {key!r}", fix="use a path relative to the dataset, with / between its parts and no '..'"
        )
    return key
