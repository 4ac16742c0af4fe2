"""Storages of datasets: files by key, in a flat and sorted namespace.

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
    """A file cannot be read or written. Retrying only helps for a `TransientStorageError`."""


class MissingFileError(StorageError):
    """The file (or the root) does not exist."""


class AccessDeniedError(StorageError):
    """The file exists, but this user may not read or write it."""


class InvalidKeyError(StorageError):
    """A key that is not a plain relative path."""


class TransientStorageError(StorageError):
    """The storage did not answer. It says nothing about the file, so the sample is not quarantined.

    A storage retries by itself, and raises this when that has failed.
    """


class Storage(Protocol):
    """A file system or object store that holds a dataset. Every method may be called from several threads at once."""

    @property
    def location(self) -> str:
        """The path or address, for messages."""
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
        """Write a file atomically: a reader sees the old content or the new one."""
        ...


def checked_key(key: str) -> str:
    """`key` itself if it is a plain relative path; raises InvalidKeyError otherwise."""
    if "\\" in key:
        message = f"not a valid file name: {key!r} contains a backslash, or a byte that is not UTF-8"
        raise InvalidKeyError(message, fix="rename the file")
    if key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidKeyError(
            f"not a valid key: {key!r}", fix="use a path relative to the dataset, with / between its parts and no '..'"
        )
    return key
