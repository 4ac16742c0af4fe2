"""A folder as a storage. Symbolic links are followed: a dataset may consist of links."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from smalti.data.storage.protocol import (
    AccessDeniedError,
    MissingFileError,
    Storage,
    StorageError,
    StoredFile,
    TransientStorageError,
    checked_key,
)
from smalti.system import atomic_write, create, fsync_directory, open_regular, sync, write

if TYPE_CHECKING:
    from smalti.data.datasets.spec import DatasetSpec

# What a network file system reports while its server is unreachable.
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems without hard links report: exFAT, and some of FUSE and SMB."""

_ATTEMPTS = 20
"""Writes of a file whose folder another thread removes in between."""


def open_local(spec: DatasetSpec) -> LocalStorage:
    """The storage of a dataset of type "local". Raises MissingFileError when its folder does not exist."""
    if spec.instance_data_dir is None:
        raise ValueError(f"dataset {spec.id!r} has no instance_data_dir")
    return LocalStorage(spec.instance_data_dir)


class LocalStorage(Storage):
    """Files below `root`. An etag consists of size and modification time, so listing reads no file.

    Folders that this object created are removed with their last file. Other folders stay, also if they become empty.
    """

    deletes = True

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root).absolute()
        self._created: set[Path] = set()
        if not self._root.is_dir():
            raise MissingFileError(
                f"{self._root} is not a folder", fix="check the path, and that its disk is mounted on this node"
            )

    @property
    def location(self) -> str:
        return str(self._root)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        folder = prefix.rpartition("/")[0]
        if folder:
            checked_key(folder)
        start = self._root / folder
        if start.is_dir():
            yield from self._walk(start, f"{folder}/" if folder else "", (prefix, after), ())

    def stat(self, key: str) -> StoredFile:
        with self._explained(key) as path:
            status = path.stat()
            if S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return _stored(key, status)

    def read(self, key: str) -> bytes:
        with self._explained(key) as path, open_regular(path) as file:
            return file.read()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._explained(key) as path, open_regular(path) as file:
            file.seek(start)
            return file.read(length)

    def write(self, key: str, data: bytes) -> None:
        with self._explained(key) as path:
            self._in_folder(path.parent, lambda: atomic_write(path, data))

    def delete(self, key: str) -> None:
        with suppress(MissingFileError), self._explained(key) as path:
            path.unlink()
            for folder in path.parents:
                if folder not in self._created:
                    break
                self._created.discard(folder)
                try:
                    folder.rmdir()
                except OSError:  # other files are in it
                    self._created.add(folder)
                    break

    def upload(self, path: Path, key: str) -> None:
        with path.open("rb") as source, self._explained(key) as target:
            self._in_folder(target.parent, lambda: _copy(source, target))

    def download(self, key: str, path: Path) -> None:
        with self._explained(key) as source, open_regular(source) as file:
            _copy(file, path)

    @property
    def creates_once(self) -> bool:
        return True

    def create(self, key: str, data: bytes) -> bool:
        """As in the protocol. Where the file system has no hard links, a reader may see a part of the file while it is written.

        A process that is killed in that moment leaves an incomplete file there, which has to be removed by hand.
        """
        with self._explained(key) as path:
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                self._in_folder(path.parent, lambda: atomic_write(draft, data))
                # Unlike a rename, a hard link is refused where there is a file.
                os.link(draft, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS or not draft.exists():
                    raise
                if not _write_new(path, data):
                    return False
            finally:
                draft.unlink(missing_ok=True)
            fsync_directory(path.parent)
        return True

    def _in_folder(self, folder: Path, write: Callable[[], None]) -> None:
        """Write a file into a folder, which is created if it is missing, with those above it."""
        for attempt in range(_ATTEMPTS):
            missing = list(takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
            try:
                for each in reversed(missing):
                    with suppress(FileExistsError):
                        each.mkdir()
                        self._created.add(each)
                write()
                return
            except FileNotFoundError:  # `delete` has removed a folder in the meantime
                if attempt == _ATTEMPTS - 1:
                    raise

    def _walk(
        self, folder: Path, base: str, limits: tuple[str, str], above: tuple[tuple[int, int], ...]
    ) -> Iterator[StoredFile]:
        """The files below a folder; `limits` are the prefix and the key after which the list starts."""
        prefix, after = limits
        with self._explained(base.rstrip("/") or ".", folder):
            status = folder.stat()
            with os.scandir(folder) as entries:
                # A folder sorts by its name with the slash, as the keys below it do: "a-b" < "a/x" < "a0".
                # Of a million entries in a folder, names are 0.1 GB, and objects with their status 1 GB.
                named = sorted((f"{entry.name}/" if _is_folder(entry) else entry.name for entry in entries), key=_text)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return  # a link to a parent folder, whose files are listed already
        for name in named:
            key = base + _text(name)
            if not key.startswith(prefix[: len(key)] if name.endswith("/") else prefix):
                continue
            if name.endswith("/"):
                if key >= after[: len(key)]:  # otherwise all keys below it sort before
                    yield from self._walk(folder / name[:-1], key, limits, (*above, here))
            elif key > after:
                path = f"{folder}/{name}"
                try:
                    stored = _listed(key, path)
                except OSError:
                    with self._explained(key, Path(path)):
                        raise
                if stored is not None:
                    yield stored

    @contextmanager
    def _explained(self, key: str, path: Path | None = None) -> Iterator[Path]:
        """Yields the path of a key, and converts errors of the operating system to StorageError."""
        target = path or self._root / checked_key(key)
        try:
            yield target
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise MissingFileError(f"{target}: no such file", fix="restore the file, or scan the dataset again") from error
        except PermissionError as error:
            raise AccessDeniedError(f"{target}: permission denied", fix="give this user permission (chmod, chown)") from error
        except OSError as error:
            if error.errno in _TRANSIENT:
                raise TransientStorageError(
                    f"{target}: {error.strerror}", fix="check the network or the file server, then start again"
                ) from error
            raise StorageError(f"{target}: {error.strerror or error}", fix="check the disk") from error


def _copy(source: BufferedReader, target: Path) -> None:
    """Copy a file atomically, in bounded memory, from its beginning."""
    source.seek(0)
    atomic_write(target, source)


def _write_new(path: Path, data: bytes) -> bool:
    """Write a file unless there is one. Returns whether it was written."""
    try:
        file = create(path)
    except FileExistsError:
        return False
    try:
        with file:
            write(file, data)
            sync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def _stored(key: str, status: os.stat_result) -> StoredFile:
    return StoredFile(key=key, size=status.st_size, etag=f"{status.st_size:x}-{status.st_mtime_ns:x}")


def _listed(key: str, path: str) -> StoredFile | None:
    """Returns an entry of a folder that is not a folder; None for one that was removed during the listing.

    Unreadable entries, such as a broken link or a pipe, are listed too: reading them reports the reason.
    """
    try:
        return _stored(key, os.stat(path))  # noqa: PTH116 - a Path for each of a million files takes longer than this call
    except OSError as error:
        if error.errno in _TRANSIENT:
            raise
        removed = isinstance(error, FileNotFoundError) and not Path(path).is_symlink()
        return None if removed else StoredFile(key=key, size=0, etag="unreadable")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno in _TRANSIENT:
            raise
        return False  # a link to itself, for instance


def _text(name: str) -> str:
    """The name as text. Bytes that are not UTF-8 become escapes with a backslash, which keys may not contain."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")
