"""What plugins keep between runs and can create again. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from smalti.errors import UserError
from smalti.system import parse_json, remove_file, write_json_atomically
from smalti.types import Cleared

_log = logging.getLogger(__name__)
_FORMAT = 1


class Cache(Protocol):
    """What the factory of a `CacheEntry` returns. Only `clear` changes anything."""

    @property
    def place(self) -> str:
        """Where the cache is, for messages: a path or an address."""
        ...

    def entries(self) -> int:
        """The number of entries."""
        ...

    def size(self) -> int:
        """The size in bytes."""
        ...

    def clear(self) -> Cleared:
        """Remove all entries, and no files of others. Raises UserError if that is not possible."""
        ...


class CacheFile:
    """JSON values by key in one file of the user's cache folder (`XDG_CACHE_HOME`). Processes may use it at the same time.

    It never stops anyone: a broken file counts as empty and is replaced by the next `put`, a folder that cannot be read or
    written changes nothing, and `report` is called.
    """

    def __init__(self, name: str, *, report: Callable[[str], object] = _log.warning) -> None:
        from platformdirs import user_cache_path

        self.path: Path = user_cache_path("smalti") / f"{name}.json"
        self._report = report

    @property
    def place(self) -> str:
        return str(self.path)

    def get(self, key: str) -> object | None:
        """The value under this key, or None."""
        return self._tell().get(key)

    def put(self, key: str, value: object) -> None:
        """Store a value. Values that other processes store at the same time are kept."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                entries, _ = self._read()
                write_json_atomically(self.path, {"format": _FORMAT, "entries": entries | {key: value}})
        except OSError as error:
            self._report(f"not cached: {error}")

    def entries(self) -> int:
        return len(self._tell())

    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def clear(self) -> Cleared:
        if not self.path.exists():
            return Cleared(count=0, bytes=0)
        try:
            with self._alone():
                cleared = Cleared(count=len(self._read()[0]), bytes=self.size())
                remove_file(self.path)
        except OSError as error:
            raise UserError(f"cannot clear {self.path}: {error}", fix="check the file's owner and permissions") from error
        return cleared

    def _tell(self) -> dict[str, object]:
        entries, complaint = self._read()
        if complaint:
            self._report(complaint)
        return entries

    def _read(self) -> tuple[dict[str, object], str]:
        """The entries of the file, and why they cannot be used if they cannot."""
        try:
            content = parse_json(self.path.read_bytes())
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, f"the cache cannot be read: {error}"
        except ValueError as error:
            return {}, f"{self.path} is damaged and will be replaced: {error}"
        entries = content.get("entries") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        if not isinstance(entries, dict):
            return {}, f"{self.path} is damaged and will be replaced: unexpected content"
        return entries, ""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the file. The lock file is not removed, because another process may hold it."""
        import fcntl

        with self.path.with_name(f".{self.path.stem}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
