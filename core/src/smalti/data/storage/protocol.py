"""Storages of datasets: files by key, in a flat and sorted namespace.

A key is a relative path with "/" between its parts, such as "cats/0001.png". Keys that could leave the root (absolute ones,
"..", empty parts) are refused with `InvalidKeyError`. Importing this module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.data.storage.columns import ROWS, file_columns
from smalti.errors import ExitCode, UserError
from smalti.system import atomic_write

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What went over the network so far. `sent` and `received` are bytes of file contents and listings, without headers."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    retries: int = 0


class Storage(ABC):
    """A file system or object store that holds a dataset. Every method may be called from several threads at once.

    A storage inherits from this class. What is not abstract has a default, made of the rest.
    """

    deletes = False
    """Whether files can be removed from it, by `delete`: those of caches and checkpoints."""
    lists_ranges = False
    """Whether several ranks should list it together: `list(after=key)` begins at that key, not at the first file."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The path or address, for messages."""

    @property
    def identity(self) -> str:
        """The same for every address of the place: latents of its images are found in a cache by it."""
        return self.location

    @abstractmethod
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        """All files whose key starts with `prefix` (plain text, not a folder), sorted by key, one at a time.

        With `after`, only keys that sort after it; it need not be a key of a file.
        """

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        """The same files as `list`, in the same order, as batches with the columns key, size (int64) and etag."""
        files = self.list(prefix, after=after)
        while rows := [*islice(files, ROWS)]:
            yield file_columns([row.key for row in rows], [row.size for row in rows], [row.etag for row in rows])

    @abstractmethod
    def stat(self, key: str) -> StoredFile:
        """Size and etag of one file. Raises MissingFileError."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole file. Raises MissingFileError."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from offset `start`; fewer at the end of the file. Raises MissingFileError."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a file atomically: a reader sees the old content or the new one."""

    def upload(self, path: Path, key: str) -> None:
        """Write the file at `path` under `key`, atomically. Raises OSError if `path` cannot be read."""
        self.write(key, path.read_bytes())

    def download(self, key: str, path: Path) -> None:
        """Write a file of the storage to `path`, atomically; its folder must exist. Raises MissingFileError."""
        atomic_write(path, self.read(key))

    @property
    def creates_once(self) -> bool:
        """Whether `create` really refuses to replace a file. A remote storage is asked, once, when this is first read."""
        return False

    def create(self, key: str, data: bytes) -> bool:
        """Write a file atomically if there is none under `key`; False if there is one, which stays as it is.

        Without `creates_once`, the file is looked for before it is written, and two writers at once may both get True.
        """
        try:
            self.stat(key)
        except MissingFileError:
            self.write(key, data)
            return True
        return False

    def delete(self, key: str) -> None:
        """Remove one file. A file that is not there is no error."""
        raise StorageError(f"{self.location}: this storage cannot delete {key}", fix="delete it with a tool of the storage")

    def traffic(self) -> dict[str, Traffic]:
        """The traffic of this object since it was opened, by operation: "list", "read", "write", ... Empty if not counted."""
        return {}


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
