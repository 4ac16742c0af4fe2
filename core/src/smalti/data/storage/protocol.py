"""Storages of datasets: files by key, in a flat and sorted namespace.

A key is a relative path with "/" between its parts, such as "cats/0001.png". Keys that could leave the root (absolute ones,
"..", empty parts) are refused with `InvalidKeyError`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from smalti.errors import ExitCode, UserError

if TYPE_CHECKING:
    import pyarrow as pa


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


class IntegrityError(StorageError):
    """The bytes are not those that were written: their digest, checksum or length differs."""


class InvalidKeyError(StorageError):
    """A key that is not a plain relative path."""


class TransientStorageError(StorageError):
    """The storage did not answer. It says nothing about the file, so the sample is not quarantined.

    A storage retries by itself, and raises this when that has failed. A run then ends with exit code 75: try again later.
    """

    exit_code = ExitCode.UNAVAILABLE


class Storage(Protocol):
    """A file system or object store that holds a dataset. Every method may be called from several threads at once."""

    @property
    def location(self) -> str:
        """The path or address, for messages."""
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        """All files whose key starts with `prefix` (plain text, not a folder), sorted by key, one at a time.

        With `after`, only keys that sort after it; it need not be a key of a file.
        """
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


@runtime_checkable
class Deletes(Protocol):
    """What a storage has in addition if files can be removed from it: those of caches and checkpoints."""

    def delete(self, key: str) -> None:
        """Remove one file. A file that is not there is no error."""
        ...


@runtime_checkable
class TransfersFiles(Protocol):
    """What a storage has in addition if it moves whole files of any size in bounded memory."""

    def upload(self, path: Path, key: str) -> None:
        """Write the file at `path` under `key`, atomically. Raises OSError if `path` cannot be read."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Write a file of the storage to `path`, atomically; its folder must exist. Raises MissingFileError."""
        ...


@runtime_checkable
class CreatesOnce(Protocol):
    """What a storage has in addition if it can write a file only where there is none, so that one of several writers wins."""

    @property
    def creates_once(self) -> bool:
        """Whether the storage really refuses to replace a file. A remote one is asked, once, when this is first read."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a file atomically if there is none under `key`; False if there is one, which stays as it is.

        Without `creates_once`, the file is looked for before it is written, and two writers at once may both get True.
        """
        ...


@runtime_checkable
class ListsFileColumns(Protocol):
    """What a storage has in addition if it lists columns instead of objects: for listings of millions of files."""

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        """The same files as `list`, in the same order, as batches with the columns key, size (int64) and etag."""
        ...


@runtime_checkable
class ListsRanges(Protocol):
    """What a storage has in addition if several ranks should list it together, each other ranges of keys."""

    @property
    def lists_ranges(self) -> bool:
        """Whether `list(after=key)` begins at that key, instead of going through all files before it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What went over the network so far. `sent` and `received` are bytes of file contents and listings, without headers."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    retries: int = 0


@runtime_checkable
class CountsTraffic(Protocol):
    """What a remote storage has in addition, for reports."""

    def traffic(self) -> dict[str, Traffic]:
        """The traffic of this object since it was opened, by operation: "list", "read", "write", ..."""
        ...


@runtime_checkable
class HasIdentity(Protocol):
    """What a storage has in addition if one place can have several addresses."""

    @property
    def identity(self) -> str:
        """The same for every address of the place: latents of its images are found in a cache by it."""
        ...


def identity_of(storage: Storage) -> str:
    """Returns what identifies a storage: its identity, or its location if it has none."""
    return storage.identity if isinstance(storage, HasIdentity) else storage.location


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
