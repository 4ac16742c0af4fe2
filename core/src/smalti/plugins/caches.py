"""What plugins keep between runs and can create again: listed and cleared in one place. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from smalti.config import Config, package_of_cache, resolve
from smalti.errors import UserError, did_you_mean
from smalti.hookspecs import HookSpecs
from smalti.plugins.factories import create
from smalti.plugins.registry import Plugins
from smalti.plugins.schema import schema_of
from smalti.system import parse_json, remove_file, write_json_atomically
from smalti.types import CacheEntry, Cleared

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


class DividedCache(Protocol):
    """What the factory of a `CacheEntry` returns that is `divided`: it has parts with names, of which each can be cleared."""

    def parts(self) -> list[dict[str, object]]:
        """The parts, JSON-able, for `smalti cache ls --json`, which prints them under the name of the entry."""
        ...

    def show(self) -> bool:
        """Print the parts as a table. Returns whether there are any."""
        ...

    def clear(self, name: str, *, yes: bool, as_json: bool) -> bool:
        """Remove the part of this name, or all for the name of the entry, and print what was removed.

        Without `yes` the user has to confirm it. Returns False, and does nothing, if no part has this name.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """One line of `smalti cache ls`."""

    name: str
    title: str
    place: str
    entries: int
    bytes: int


# --- the caches of all plugins --------------------------------------------------------------------------------------


def list_caches(plugins: Plugins, config: Config | None = None) -> list[CacheReport]:
    """Every cache that is not divided, with its size, sorted by name. `config` locates those whose place is an option."""
    reports = []
    for entry in (each for each in plugins.gather(HookSpecs.register_caches) if not each.divided):
        cache = _open(entry, plugins, config)
        reports.append(
            CacheReport(name=entry.name, title=entry.title, place=cache.place, entries=cache.entries(), bytes=cache.size())
        )
    return reports


def find_cache(plugins: Plugins, name: str, config: Config | None = None) -> Cache:
    """The cache of this name, in any spelling. Raises UserError with the known names."""
    entries = {entry.name: entry for entry in plugins.gather(HookSpecs.register_caches) if not entry.divided}
    spelled = {_fold(each): each for each in entries}
    if _fold(name) in spelled:
        return _open(entries[spelled[_fold(name)]], plugins, config)
    if package := package_of_cache(_fold(name)):
        raise package.error(f"the cache {name!r} belongs to {package.distribution}")
    hint = did_you_mean(_fold(name), entries, count=3)
    raise UserError(f"unknown cache {name!r}", fix=f"{hint} caches: {', '.join(entries) or 'none'}".lstrip())


def divided_caches(plugins: Plugins, config: Config | None = None) -> dict[str, DividedCache]:
    """The caches with parts that have names of their own."""
    entries = [entry for entry in plugins.gather(HookSpecs.register_caches) if entry.divided]
    return {entry.name: cast(DividedCache, create(entry, entry.factory, config, plugins)) for entry in entries}


def _open(entry: CacheEntry, plugins: Plugins, config: Config | None) -> Cache:
    if not entry.configured:
        return cast(Cache, create(entry, entry.factory))
    if config is None:
        config = resolve(schema_of(plugins), ("--accelerate_config=none",))
    return cast(Cache, create(entry, entry.factory, config))


def _fold(name: str) -> str:
    return name.strip().lower().replace("_", "-")


# --- a cache in one file --------------------------------------------------------------------------------------------


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
