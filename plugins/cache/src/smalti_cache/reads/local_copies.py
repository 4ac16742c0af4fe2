"""Copies of entries of remote caches on a drive of the node, up to a number of bytes, for all processes of the node.

A file per entry, because a shuffled order reads single entries of each pack. A copy that was used since the first of the
processes that use the folder now has opened it is never evicted: in a shuffled order each entry is read once in an epoch, and
evicting the least recently used one would evict what is needed next. So once the limit is reached by copies in use, further
entries are not copied. Older copies are evicted, those first that were not used for the longest time. A use is noted once in a
run, as the time of change of the file.

Files: `entries/XX/NAME`, drafts in `drafts`, `bytes` with their sum, `users`, which every process locks, and in `openings` a
file per process, locked while it lives, whose time is that at which the process has opened the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from heapq import nsmallest
from pathlib import Path

from smalti_cache.directory import write_problem

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{38}")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_DRAFT = re.compile(r"[0-9a-f]{16}\.draft")
_OPENING = re.compile(r"[0-9a-f]{16}")
_BLOCK = 4096
_CANDIDATES = 1 << 16
"""Copies to evict that are found in one look at all of them: about 16 MB."""


class LocalCopies:
    """Copies of entries below `folder`, with at most `limit` bytes. All methods may be called from several threads.

    Several processes may use one folder. Nothing is deleted but copies and drafts that this class wrote. Copies are not checked
    here: whoever reads one compares its checksum, and calls `discard`. Raises OSError if the folder cannot be used.
    """

    def __init__(self, folder: Path, limit: int, *, report: Callable[[str], object] = _log.warning) -> None:
        self._folder = folder
        self._limit = limit
        self._report = report
        self._full = self._failed = False
        self._oldest: deque[tuple[int, str]] = deque()
        self._thread_lock = threading.Lock()
        for each in (folder, folder / "entries", folder / "drafts", folder / "openings"):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        if problem := write_problem(folder):
            raise PermissionError(problem)
        self._bytes = os.open(folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._users = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process uses the folder
        else:
            self._count()
        fcntl.flock(self._users, fcntl.LOCK_SH)
        self._opening = self._note_opening()
        self._opened = os.fstat(self._opening).st_mtime_ns  # by the clock that the copies are compared with

    def close(self) -> None:
        """Afterwards another process may count the copies again, and evict those that only this process has used."""
        for descriptor in (self._opening, self._users, self._bytes):
            os.close(descriptor)

    def get(self, name: str) -> bytes | None:
        """Returns the copy of an entry; None if there is none."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read()
        except OSError:
            return None
        if status.st_mtime_ns < self._opened:
            with suppress(OSError):  # it may have been evicted
                os.utime(path)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep a copy of an entry, if there is room or older copies can be evicted."""
        path, draft = self._path(name), self._folder / "drafts" / f"{secrets.token_hex(8)}.draft"
        size = _size_on_disk(len(data))
        try:
            if self._failed or path.exists() or not self._reserve(size):
                return
        except OSError as error:
            self._fail(error)
            return
        kept = False
        try:
            draft.write_bytes(data)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with self._locked():
                if not path.exists():  # otherwise another process was faster
                    draft.rename(path)
                    kept = True
        except OSError as error:
            self._fail(error)
        finally:
            if not kept:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                    self._add(-size)

    def discard(self, name: str) -> None:
        """Remove the copy of an entry, because it is damaged."""
        path = self._path(name)
        with suppress(OSError), self._locked():
            size = _size_on_disk(path.stat().st_size)
            path.unlink()
            self._write_sum(self._read_sum() - size)

    # ---

    def _path(self, name: str) -> Path:
        digest = sha256(name.encode()).hexdigest()
        return self._folder / "entries" / digest[:2] / digest[2:40]

    def _note_opening(self) -> int:
        """Returns the descriptor of a new file in `openings`, which is locked before others see it."""
        name = secrets.token_hex(8)
        draft = self._folder / "drafts" / f"{name}.draft"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        draft.rename(self._folder / "openings" / name)
        return descriptor

    def _first_opening(self) -> int:
        """Returns when the first of the processes that use the folder now has opened it. Removes what dead ones have left."""
        times = [self._opened]
        for path in (self._folder / "openings").iterdir():
            if not _OPENING.fullmatch(path.name):
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    times.append(os.fstat(file.fileno()).st_mtime_ns)
                else:
                    path.unlink()
        return min(times)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._report(f"no more copies of cached entries are kept in {self._folder}: {error.strerror or error}")

    def _reserve(self, size: int) -> bool:
        """Count bytes before they are written, so that a kill leaves too large a sum, which the next count corrects."""
        while True:
            with self._locked():
                total = self._read_sum()
                while total + size > self._limit and self._oldest:
                    total -= self._evict(*self._oldest.popleft())
                fits = total + size <= self._limit
                self._write_sum(total + size if fits else total)
            if fits or self._full or size > self._limit:
                return fits
            self._oldest.extend(self._find_oldest())
            self._full = not self._oldest

    def _evict(self, used: int, path: str) -> int:
        """Remove a copy, unless it was used since; returns how many bytes became free."""
        try:
            status = Path(path).stat()
            if status.st_mtime_ns != used:
                return 0
            Path(path).unlink()
        except FileNotFoundError:
            return 0
        return _size_on_disk(status.st_size)

    def _find_oldest(self) -> list[tuple[int, str]]:
        first = self._first_opening()
        found = ((status.st_mtime_ns, path) for path, status in self._copies() if status.st_mtime_ns < first)
        return nsmallest(_CANDIDATES, found)

    def _copies(self) -> Iterator[tuple[str, os.stat_result]]:
        for folder in (self._folder / "entries").iterdir():
            if not _FOLDER.fullmatch(folder.name):
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            yield entry.path, entry.stat(follow_symlinks=False)

    def _count(self) -> None:
        """Remove drafts, and count the copies. No other process may be using the folder."""
        for draft in (self._folder / "drafts").iterdir():
            if _DRAFT.fullmatch(draft.name):
                draft.unlink()
        self._write_sum(sum(_size_on_disk(status.st_size) for _, status in self._copies()))

    def _add(self, size: int) -> None:
        with self._locked():
            self._write_sum(self._read_sum() + size)

    def _read_sum(self) -> int:
        return int.from_bytes(os.pread(self._bytes, 8, 0), "little")

    def _write_sum(self, total: int) -> None:
        os.pwrite(self._bytes, max(0, total).to_bytes(8, "little"), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._bytes, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._bytes, fcntl.LOCK_UN)


def open_local_copies(folder: Path, limit: int, *, report: Callable[[str], object] = _log.warning) -> LocalCopies | None:
    """Returns the copies of this user below a folder; None, after a message, if it cannot be used for them."""
    place = folder.expanduser().absolute() / f"smalti-cache-{os.geteuid()}"
    try:
        return LocalCopies(place, limit, report=report)
    except OSError as error:
        reason = error.strerror or error
        report(f"no copies of cached entries are kept in {place}: {reason}; every read goes to the remote storage")
        return None


def _size_on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
