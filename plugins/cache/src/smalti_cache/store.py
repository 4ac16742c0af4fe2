"""A store of entries: packs below one prefix of a storage, a folder or an object store.

A pack is complete or absent, is never changed, and has a unique name, so processes may add packs at the same time; what two of
them put under one key is the same. Nothing is deleted: a small file takes note of a damaged entry, which is then made again.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smalti import UserError
from smalti.data import IntegrityError, LocalStorage, Storage, StorageError, TransientStorageError
from smalti.system import load_json
from smalti_cache.directory import Directory, Place
from smalti_cache.entries import decode
from smalti_cache.index_files import SUFFIX, IndexFiles
from smalti_cache.keys import Key, Keys
from smalti_cache.pack import Columns, PackBuilder, PackIndex, encode_columns, read_pack
from smalti_cache.reads.local_copies import LocalCopies
from smalti_cache.reads.ranges import AT_ONCE, LOCAL_GAP, REMOTE_GAP, Range, ranges_of, read_all

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_PACK = ".safetensors"
_DAMAGED = ".damaged"
USED = "used.json"
"""The file of a store with the time of its last use: when a run starts, and once a day of a long one. In seconds since 1970."""
_USE_SECONDS = 24 * 3600

Read = Callable[[str, int, int], bytes]
"""Reads bytes of a file: its name, the first byte, how many."""


class PackStore:
    """The entries of one encoder. All methods may be called from several threads.

    A pack that cannot be read is reported once and counts as absent, so its entries are encoded again.

    Args:
        storage: where the packs are.
        prefix: the folder of the packs there, "" for the root.
        folder: of this node, for the merged index of large stores; None keeps it in memory.
        compress: whether entries that are put are compressed; what is there is read in any case.
        read: reads from files below the prefix; by default from the storage.
        copies: on a drive of this node, of entries that are read; None keeps none.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        folder: Path | None = None,
        compress: bool = False,
        read: Read | None = None,
        copies: LocalCopies | None = None,
        report: Callable[[str], object] = _log.warning,
    ) -> None:
        self._storage = storage
        self._prefix = f"{prefix}/" if prefix else ""
        self.read: Read = read or self._read_storage
        self._copies = copies
        self._report = report
        self.compress = compress
        self._directory = Directory(folder, sha256(f"{self}".encode()).hexdigest()[:16])
        self._indexes = IndexFiles(storage, self._prefix, self._open, report)
        self._seen: set[str] = set()
        self.earlier_parts: dict[str, int] = {}
        """Parts that an earlier version wrote, by name, with their sizes."""
        self.unreadable: set[str] = set()
        """Packs that cannot be read."""
        self.written: list[str] = []
        """The packs that this process has put."""
        self._lock = threading.Lock()
        self._next_mark: float | None = None

    def __str__(self) -> str:
        return f"{self._storage.location.rstrip('/')}/{self._prefix}".rstrip("/")

    def __len__(self) -> int:
        """The number of entries that this process has seen; what several packs have counts several times."""
        return len(self._directory)

    @property
    def columns(self) -> tuple[Columns, ...]:
        """Where the entries are, in several tables sorted by key."""
        return self._directory.tables()

    @property
    def damaged(self) -> frozenset[tuple[Key, str, int]]:
        """Damaged entries that are known: their key, file and first byte."""
        with self._lock:
            return self._directory.all_damaged()

    def files(self) -> dict[str, int]:
        """The files that there are now, by name, with their sizes: packs, their indexes, and notes of damaged entries."""
        found = {}
        for file in self._storage.list(self._prefix):
            name = file.key[len(self._prefix) :]
            if name.endswith((_PACK, _DAMAGED, SUFFIX)) and not name.startswith(".") and "/" not in name:
                found[name] = file.size
        return found

    def refresh(self, files: Mapping[str, int] | None = None) -> None:
        """Open the packs that are new in the list of files, by default all that there are."""
        files = self.files() if files is None else files
        with self._lock:
            packs = _packs_in(files)
            self._directory.open_merged(packs)
            self._seen |= self._directory.packs
            new = {name: size for name, size in sorted(packs.items()) if name not in self._seen}
            self._directory.add(self._indexes.opened(files, new))
            self._directory.merge()
            notes = [name for name in sorted(files) if name.endswith(_DAMAGED) and name not in self._seen]
            for _ in read_all(self._read_note, notes, at_once=AT_ONCE):
                pass
            self._seen |= {*new, *notes}

    def add_indexes(self, files: Mapping[str, int]) -> dict[str, int]:
        """Write indexes of those packs of a list of files that none has yet, if they are many; returns the list with them.

        One process of a run calls this.
        """
        found = dict(files)
        with suppress(StorageError):  # of a store that can only be read, each process reads the packs
            for name, data in self._indexes.additions(files, _packs_in(files)):
                self._storage.write(self._prefix + name, data)
                found[name] = len(data)
        return found

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Returns for each key whether there is an entry, as of the last `refresh`."""
        with self._lock:
            return self._directory.find(keys)

    def put(self, pack: PackBuilder) -> str:
        """Store the entries of a pack; returns its name. Afterwards they survive a power failure.

        They are found after the next `refresh`. Raises UserError without space or permission.
        """
        return self._write(pack.build(), len(pack))

    def put_references(self, index: PackIndex) -> str:
        """Add entries that other files below the prefix hold; returns the name of the pack. `index` is in any order."""
        order = index.keys.order()
        columns = {name: column[order] for name, column in index.columns.items()}
        return self._write(encode_columns(columns, index.forms, files=index.files), len(index))

    def adopt(self, earlier: Keys, now: Keys) -> NDArray[np.bool_]:
        """Add references under present keys to entries that are there under earlier ones; returns which are.

        Like what is put, they are found after the next `refresh`.
        """
        with self._lock:
            there = self._directory.find(earlier)
            there &= ~np.isin(earlier.high, np.array([high for high, _ in self._directory.damaged_keys], dtype=np.uint64))
            found = np.flatnonzero(there)
            references = self._directory.references(earlier[found], now[found])
        if len(references):
            self.put_references(references)
        return there

    def get(self, key: Key) -> dict[str, Tensor]:
        """Returns one entry, on the CPU. Raises KeyError for a missing key, UserError if the entry cannot be read."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Key]) -> list[dict[str, Tensor]]:
        """Like `get` for several entries, with few reads: near ones at once, and of a remote storage several at a time.

        Memory is bounded by `LARGEST * AT_ONCE` bytes beside the entries. A key that is there twice has one entry.
        """
        if self._next_mark is not None and time.monotonic() > self._next_mark:
            self.mark_used()
        places = {key: self._place(key) for key in keys}
        found = {key: entry for key, place in places.items() if (entry := self._copied(place)) is not None}
        missing = [(key, place) for key, place in places.items() if key not in found]
        local = isinstance(self._storage, LocalStorage)
        ranges = ranges_of([place for _, place in missing], gap=LOCAL_GAP if local else REMOTE_GAP)

        def read(one: Range) -> list[tuple[Key, dict[str, Tensor]]]:
            return self._load_range(one, [missing[number] for number in one.members])

        for entries in read_all(read, ranges, at_once=1 if local else AT_ONCE):
            found.update(entries)
        return [found[key] for key in keys]

    def forget(self) -> None:
        """Remove the merged indexes of this store on this node."""
        self._directory.remove_merged()

    def mark_used(self) -> None:
        """Note that the store is used now, and each day while it is read. One process of a run does that."""
        self._next_mark = time.monotonic() + _USE_SECONDS
        with suppress(StorageError):  # of a store that can only be read, the last use is not known
            self._storage.write(self._prefix + USED, json.dumps({"used": time.time()}).encode())

    def check(self, key: Key, place: Place) -> bool:
        """Reads an entry; returns whether it is intact. A damaged one is noted, and counts as absent from now on."""
        try:
            self._load(key, place)
        except IntegrityError:
            return False
        return True

    # ---

    def _place(self, key: Key) -> Place:
        """Raises KeyError for a missing key, IntegrityError for an entry that is known to be damaged."""
        with self._lock:
            place = self._directory.place(key)
            damaged = self._directory.damaged(key) if place is None else ()
        for file, offset in damaged:
            raise IntegrityError(f"{self}/{file} is damaged at byte {offset}", fix=_AGAIN)
        if place is None:
            raise KeyError(f"{key[0]:016x}{key[1]:016x}")
        return place

    def _copied(self, place: Place) -> dict[str, Tensor] | None:
        """Returns an entry from its copy on this node; None if there is no intact one."""
        if self._copies is None or not place.form.checked:
            return None
        name = _copy_name(place)
        if (data := self._copies.get(name)) is None:
            return None
        try:
            return _decoded(place, data)
        except ValueError:
            self._copies.discard(name)
            return None

    def _load_range(self, one: Range, members: Sequence[tuple[Key, Place]]) -> list[tuple[Key, dict[str, Tensor]]]:
        """Returns the entries of a range. One that is damaged is read again by itself; raises what `_load` raises."""
        try:
            data = self.read(one.file, one.start, one.stop - one.start)
        except StorageError as error:
            raise self._unreadable(one.file, error) from error
        found = []
        for key, place in members:
            begin = place.offset - one.start
            found.append((key, self._load(key, place, data[begin : begin + place.length])))
        return found

    def _load(self, key: Key, place: Place, data: bytes | None = None) -> dict[str, Tensor]:
        """Returns an entry, from what was read of it, if anything was.

        Raises IntegrityError for a damaged entry, UserError for one that cannot be read.
        """
        problem = ""
        for _ in range(2):  # what was damaged on the way is good the second time
            try:
                stored = self.read(place.file, place.offset, place.length) if data is None else data
                entry = _decoded(place, stored)
            except ValueError as error:
                problem, data = f"{error}", None
            except StorageError as error:
                raise self._unreadable(place.file, error) from error
            else:
                if self._copies is not None and place.form.checked:
                    self._copies.put(_copy_name(place), stored)
                return entry
        self._note_damage(key, place)
        raise IntegrityError(f"{self}/{place.file} is damaged at byte {place.offset}: {problem}", fix=_AGAIN)

    def _unreadable(self, file: str, error: StorageError) -> UserError:
        return UserError(f"{self}/{file} can no longer be read: {error.message}", fix=_AGAIN)

    def _note_damage(self, key: Key, place: Place) -> None:
        with self._lock:
            self._directory.mark_damaged(key, place.file, place.offset)
        note = json.dumps({"key": list(key), "file": place.file, "offset": place.offset})
        with suppress(StorageError):  # then the next run finds it by itself
            self._storage.write(f"{self._prefix}{secrets.token_hex(8)}{_DAMAGED}", note.encode())

    def _read_note(self, name: str) -> None:
        try:
            note = load_json(self._storage.read(self._prefix + name))
            high, low = note["key"]
            self._directory.mark_damaged((int(high), int(low)), str(note["file"]), int(note["offset"]))
        except TransientStorageError:
            raise
        except (StorageError, ValueError, KeyError, TypeError) as error:
            self._report(f"{self}/{name} cannot be read ({error}); it is ignored")

    def _open(self, name: str, size: int) -> PackIndex | None:
        try:
            index = read_pack(name, size, lambda start, length: self._read_storage(name, start, length))
        except TransientStorageError:
            raise
        except (StorageError, ValueError, KeyError, TypeError) as error:
            problem = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            if name not in self.unreadable:
                self._report(f"{self}/{name} cannot be read ({problem}); its entries are encoded again, and it can be deleted")
            self.unreadable.add(name)
            return None
        if index is None:
            self.earlier_parts[name] = size
        return index

    def _read_storage(self, name: str, start: int, length: int) -> bytes:
        return self._storage.read_range(self._prefix + name, start, length)

    def _write(self, data: bytes, entries: int) -> str:
        name = f"{secrets.token_hex(8)}{_PACK}"
        try:
            self._storage.write(self._prefix + name, data)
        except StorageError as error:
            local = isinstance(self._storage, LocalStorage)
            fix = "free space or give write permission there, or set --cache_dir=FOLDER" if local else error.fix
            fix = f"{fix}; written entries are kept, so start again"
            raise UserError(f"cannot write {entries} entries to {self}: {error.message}", fix=fix) from error
        self.written.append(name)
        return name


def _packs_in(files: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in files.items() if name.endswith(_PACK)}


def _decoded(place: Place, data: bytes) -> dict[str, Tensor]:
    """Raises ValueError if the bytes are not those of the entry."""
    if len(data) != place.length:
        raise ValueError("it was truncated")
    if place.form.checked and zlib.crc32(data) != place.crc:
        raise ValueError("an entry does not match its checksum")
    return decode(place.form, data)


def _copy_name(place: Place) -> str:
    """Names of packs are unique, so the same in every process that reads the store under any address."""
    return f"{place.file}:{place.offset}:{place.length}:{place.crc}"


_AGAIN = "start again: missing and damaged entries are encoded again"
