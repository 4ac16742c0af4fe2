"""Indexes of many packs in one file beside them: a large store is opened with few reads, on every node.

Such a file is never changed, and there may be any number: each has the packs that none had when it was written. It is only a
copy of what the packs say themselves. One that cannot be read, or that names a pack which is not there, is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

from smalti import UserError
from smalti.data import Storage, StorageError, TransientStorageError
from smalti_cache.directory import Directory
from smalti_cache.pack import PackIndex, encode_columns, read_pack, read_packs
from smalti_cache.reads.ranges import read_all

SUFFIX = ".index"
LEAST = 1000
"""Packs without an index that are worth one: reading their headers takes about a second."""
_ENTRIES = 1 << 20
_PACKS = 1 << 18
"""Entries and packs of an index: 40 and 12 MB."""
HEADERS_AT_ONCE = 64
_INDEXES_AT_ONCE = 8
_WINDOW = 1024
"""Headers of packs that are in memory together."""

Opened: TypeAlias = "tuple[Mapping[str, int], PackIndex]"
"""Names and sizes of packs, and where their entries are."""


class IndexFiles:
    """The indexes of the store below `prefix`. `open_pack` returns the index of one pack, None if that cannot be read."""

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        open_pack: Callable[[str, int], PackIndex | None],
        report: Callable[[str], object],
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._open_pack = open_pack
        self._report = report
        self._known: dict[str, Mapping[str, int]] = {}

    def opened(self, files: Mapping[str, int], packs: Mapping[str, int]) -> Iterator[Opened]:
        """Yields the entries of these packs, from as few files of the store as possible."""
        left, chosen = dict(packs), []
        for name, some in self._usable(files).items() if packs else ():
            if not left.keys().isdisjoint(some):
                chosen.append(name)
                for pack in some:
                    left.pop(pack, None)
        for start in range(0, len(chosen), _INDEXES_AT_ONCE):
            names = chosen[start : start + _INDEXES_AT_ONCE]
            for name, index in zip(names, read_all(self._open, names, at_once=_INDEXES_AT_ONCE), strict=True):
                if index is None:
                    left |= {pack: size for pack, size in self._known.pop(name).items() if pack in packs}
                else:
                    yield index.packs, index
        yield from self._headers([*left.items()])

    def additions(self, files: Mapping[str, int], packs: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
        """Yields names and contents of indexes of those packs that no index has, if they are many."""
        known = set[str]().union(*self._usable(files).values())
        left = [(name, size) for name, size in packs.items() if name not in known]
        if len(left) < LEAST:
            return
        directory = Directory(None, "")
        for opened in self._headers(left):
            directory.add([opened])
            if len(directory) >= _ENTRIES or len(directory.packs) >= _PACKS:
                yield _encoded(directory.index())
                directory = Directory(None, "")
        if len(directory.packs) >= LEAST:  # the headers of fewer are read in no time
            yield _encoded(directory.index())

    def _usable(self, files: Mapping[str, int]) -> dict[str, Mapping[str, int]]:
        """Returns the packs of each index, those with packs that are not there left out."""
        new = [(name, size) for name, size in files.items() if name.endswith(SUFFIX) and name not in self._known]
        self._known |= zip((name for name, _ in new), read_all(self._packs, new, at_once=HEADERS_AT_ONCE), strict=True)
        known = {name: self._known[name] for name in files if name in self._known}
        return {name: packs for name, packs in known.items() if packs and packs.items() <= files.items()}

    def _headers(self, packs: Sequence[tuple[str, int]]) -> Iterator[Opened]:
        for start in range(0, len(packs), _WINDOW):
            some = packs[start : start + _WINDOW]
            indexes = read_all(lambda pack: self._open_pack(*pack), some, at_once=HEADERS_AT_ONCE)
            for (name, size), index in zip(some, indexes, strict=True):
                if index is not None:
                    yield {name: size}, index

    def _packs(self, file: tuple[str, int]) -> Mapping[str, int]:
        """The packs of an index; none if it cannot be read."""
        name, size = file
        try:
            return read_packs(size, lambda start, length: self._storage.read_range(self._prefix + name, start, length))
        except TransientStorageError:
            raise
        except (StorageError, ValueError, KeyError, TypeError) as error:
            self._ignore(name, error)
            return {}

    def _open(self, name: str) -> PackIndex | None:
        try:
            data = self._storage.read(self._prefix + name)
            return read_pack(name, len(data), lambda start, length: data[start : start + length])
        except TransientStorageError:
            raise
        except (StorageError, ValueError, KeyError, TypeError) as error:
            self._ignore(name, error)
            return None

    def _ignore(self, name: str, error: Exception) -> None:
        problem = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        where = f"{self._storage.location.rstrip('/')}/{self._prefix}{name}"
        self._report(f"{where} cannot be read ({problem}); the headers of the packs are read instead; it can be deleted")


def _encoded(index: PackIndex) -> tuple[str, bytes]:
    packs = dict(sorted(index.packs.items()))
    name = sha256(json.dumps(packs).encode()).hexdigest()[:16] + SUFFIX
    return name, encode_columns(index.columns, index.forms, files=index.files, packs=packs)
