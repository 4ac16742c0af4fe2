"""What caches of latents and captions contain: listed, verified and removed. Listing imports no torch."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import numpy as np

from smalti import UserError
from smalti.data import (
    Catalog,
    LocalStorage,
    MissingFileError,
    Storage,
    StorageError,
    Threads,
    TransientStorageError,
)
from smalti.system import load_json
from smalti_cache.directory import Place, default_folder
from smalti_cache.index_files import HEADERS_AT_ONCE
from smalti_cache.keys import Key, Keys
from smalti_cache.pack import PackIndex, read_pack
from smalti_cache.places import CacheFolders, CachePlace
from smalti_cache.reads.ranges import read_all
from smalti_cache.store import USED, PackStore, Read

DESCRIPTION = "encoder.json"
"""The file of a store that says which encoder made its entries."""
_NAME = re.compile(r"(latents|texts)-.+-([0-9a-f]{16})")
_PACK = ".safetensors"
_DAMAGED = ".damaged"
_WINDOW = 16 << 20
_THREADS = 4

Progress = Callable[[int, int], object]
"""Called with the bytes that are done, and those of all."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an encoder's cache has. `entries` that several packs have count several times.

    `unreadable` are packs that cannot be read. `damaged` is how many entries were found to be damaged. `written` is the time of
    the last pack in seconds since 1970; None if the storage does not tell. `used` is the time of the last use that was
    noted, or of the last pack if that is later; None if neither is known.
    """

    entries: int
    bytes: int
    packs: int
    damaged: int
    unreadable: tuple[str, ...]
    written: float | None
    used: float | None


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What `verify` found. `problems` are messages; `missing` counts entries for which there is no intact copy."""

    entries: int
    bytes: int
    missing: int
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CachedEncodings:
    """The cache of one encoder: a folder in a folder of caches, or a prefix of another storage."""

    name: str
    storage: Storage
    prefix: str
    folder: Path | None = None
    """The local folder of the packs."""

    def __str__(self) -> str:
        return f"{self.storage.location.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def family(self) -> str:
        return self.name.partition("-")[2].rpartition("-")[0]

    def matches(self, pattern: str) -> bool:
        """Whether this is the cache of that name, kind or family; `pattern` may have * and ?."""
        return any(fnmatchcase(each, pattern) for each in (self.name, self.kind, self.family))

    def contents(self) -> Contents:
        """Reads the indexes of all packs, several at once."""
        files = self._files()
        packs = [name for name in files if name.endswith(_PACK)]

        def count(name: str) -> int | None:
            try:
                index = self._index(name, files[name])
            except TransientStorageError:
                raise
            except (StorageError, ValueError, KeyError, TypeError):
                return None
            return 0 if index is None else len(index)

        counts = dict(zip(packs, read_all(count, packs, at_once=HEADERS_AT_ONCE), strict=True))
        return Contents(
            entries=sum(each or 0 for each in counts.values()),
            bytes=sum(files.values()),
            packs=len(packs),
            damaged=sum(name.endswith(_DAMAGED) for name in files),
            unreadable=tuple(name for name, each in counts.items() if each is None),
            written=self.written(),
            used=self.used(),
        )

    def used(self) -> float | None:
        """Returns when a run last used or wrote the cache, in seconds since 1970; None if that is not known."""
        times = [self.written()]
        with suppress(MissingFileError, ValueError, KeyError, TypeError):
            times.append(float(load_json(self.storage.read(self._prefixed(USED)))["used"]))
        return max((time for time in times if time is not None), default=None)

    def written(self) -> float | None:
        """Returns when the last pack was written, in seconds since 1970; None if the storage does not tell."""
        if self.folder is None:
            return None
        times = [path.stat().st_mtime for path in self.folder.iterdir() if path.name.endswith((_PACK, DESCRIPTION))]
        return max(times, default=None)

    def verify(self, progress: Progress = lambda done, total: None) -> Verified:
        """Reads every entry, of several packs at once. A damaged one is noted, so that the next run encodes it again."""
        problems: list[str] = []
        store = PackStore(self.storage, self.prefix, read=_InWindows(self._read), report=problems.append)
        files = store.files()
        store.refresh(files)
        done, total = 0, sum(int(table["length"].sum(dtype=np.uint64)) for table in store.columns)
        known, lock = store.damaged, threading.Lock()

        def look(name: str) -> list[str]:
            nonlocal done
            index, found = self._index(name, files[name]), []
            for key, place in _entries(index) if index is not None else ():
                if (key, place.file, place.offset) not in known and (problem := _problem(store, key, place)):
                    found.append(problem)
                with lock:
                    done += place.length
                    progress(done, total)
            return found

        with Threads(_THREADS, "smalti-verify") as threads:
            for found in threads.map(look, [each for each in files if each.endswith(_PACK) and each not in store.unreadable]):
                problems += found
        keys = Keys.of(sorted({key for key, _, _ in store.damaged}))
        missing = int((~store.has(keys)).sum())
        return Verified(entries=len(store), bytes=total, missing=missing, problems=tuple(problems))

    def remove(self) -> int:
        """Remove the packs, their notes and the description, and nothing else. Returns the number of bytes.

        No run may be using the cache. A removal that was interrupted can be repeated. Raises UserError if the folder is not the
        cache of an encoder, or if files cannot be removed.
        """
        if problem := self.problem:
            raise UserError(f"{self} was not removed: {problem}", fix="look at the folder, and delete it yourself")
        if not self.storage.deletes:
            raise UserError(
                f"{self} was not removed: its storage cannot delete files", fix="delete it with a tool of the storage"
            )
        removed = 0
        files = self._files()
        packs = [name for name in files if name.endswith(_PACK)]
        refer = read_all(lambda name: self._refers(name, files[name]), packs, at_once=HEADERS_AT_ONCE)
        referring = {name for name, others in zip(packs, refer, strict=True) if others}
        for name in sorted(files, key=lambda each: (each == DESCRIPTION, each.endswith(_DAMAGED), each not in referring, each)):
            if name == DESCRIPTION and any(each.endswith(_PACK) for each in self._files()):
                break  # a run has added packs
            self.storage.delete(self._prefixed(name))
            removed += files[name]
        PackStore(self.storage, self.prefix, folder=default_folder()).forget()
        if self.folder is not None:
            with suppress(OSError):  # there are files of others
                self.folder.rmdir()
        return removed

    @property
    def problem(self) -> str:
        """Why this may not be the cache of an encoder; "" if it is: the description matches the name of the folder."""
        try:
            identity = load_json(self.storage.read(self._prefixed(DESCRIPTION)))
        except MissingFileError:
            return f"it has no {DESCRIPTION}"
        except ValueError:
            return f"its {DESCRIPTION} is damaged"
        same = isinstance(identity, dict) and self.name.endswith(f"-{digest_of(json.dumps(identity, sort_keys=True))}")
        return "" if same else f"its {DESCRIPTION} does not match the name of the folder"

    # ---

    def _files(self) -> dict[str, int]:
        """The files of the cache, by name, with their sizes."""
        files = PackStore(self.storage, self.prefix).files()
        for name in (DESCRIPTION, USED):
            with suppress(MissingFileError):
                files[name] = self.storage.stat(self._prefixed(name)).size
        return files

    def _index(self, name: str, size: int) -> PackIndex | None:
        return read_pack(name, size, lambda start, length: self._read(name, start, length))

    def _refers(self, name: str, size: int) -> bool:
        """Whether a pack refers to other files, so that it has to be removed before them."""
        try:
            index = self._index(name, size)
        except TransientStorageError:
            raise
        except (StorageError, ValueError, KeyError, TypeError):
            return False
        return index is not None and index.files != (name,)

    def _read(self, name: str, start: int, length: int) -> bytes:
        return self.storage.read_range(self._prefixed(name), start, length)

    def _prefixed(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name


def cached_encodings(folders: CacheFolders) -> list[CachedEncodings]:
    """Returns the caches of all encoders in the places of a run. Creates nothing."""
    places = {place.id: place for place in (folders.texts, *folders.own_texts.values(), *folders.latents.values())}
    return [each for place in places.values() for each in _in_place(place, folders.catalog)]


def cached_encodings_in(folder: Path) -> list[CachedEncodings]:
    """Returns the caches of all encoders in a local folder of caches. Creates nothing."""
    return cached_encodings(CacheFolders(texts=CachePlace(folder=folder.expanduser().absolute()), latents={}))


def digest_of(identity: str) -> str:
    """Returns the last part of the name of an encoder's cache."""
    return sha256(identity.encode()).hexdigest()[:16]


def _in_place(place: CachePlace, catalog: Catalog) -> Iterator[CachedEncodings]:
    if place.spec is not None:
        storage = catalog.open_storage(place.spec)
        prefix = f"{place.prefix}/" if place.prefix else ""
        for kind in ("latents-", "texts-"):
            after = ""
            while (file := next(iter(storage.list(prefix + kind, after=after)), None)) is not None:
                name = file.key[len(prefix) :].split("/")[0]
                after = f"{prefix}{name}0"  # the next character after "/": what is below this name is not listed
                if _NAME.fullmatch(name):
                    yield CachedEncodings(name=name, storage=storage, prefix=prefix + name)
    elif place.folder is not None and place.folder.is_dir():
        for folder in sorted(place.folder.iterdir()):
            if _NAME.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                yield CachedEncodings(name=folder.name, storage=LocalStorage(folder), prefix="", folder=folder)


def _entries(index: PackIndex) -> Iterator[tuple[Key, Place]]:
    """Yields the entries of a pack in the order of their bytes."""
    columns = index.columns
    for row in np.lexsort((columns["offset"], columns["file"])).tolist():
        offset, length, crc, form, file = (int(columns[name][row]) for name in ("offset", "length", "crc", "form", "file"))
        place = Place(file=index.files[file], offset=offset, length=length, crc=crc, form=index.forms[form])
        yield (int(columns["high"][row]), int(columns["low"][row])), place


def _problem(store: PackStore, key: Key, place: Place) -> str:
    try:
        return "" if store.check(key, place) else f"{store}/{place.file} is damaged at byte {place.offset}"
    except UserError as error:
        if isinstance(error.__cause__, TransientStorageError):
            raise
        return error.message


class _InWindows(threading.local):
    """Reads files in large steps, each thread its own. What is asked for twice, as after a damaged entry, is read again."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._file, self._start, self._data = "", 0, b""
        self._last = ("", 0)

    def __call__(self, name: str, start: int, length: int) -> bytes:
        again, self._last = self._last == (name, start), (name, start)
        if again or length >= _WINDOW:
            return self._read(name, start, length)
        begin = start - self._start
        if name != self._file or begin < 0 or begin + length > len(self._data):
            self._data = self._read(name, start, _WINDOW)
            self._file, self._start, begin = name, start, 0
        return self._data[begin : begin + length]
