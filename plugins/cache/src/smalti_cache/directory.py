"""Where the entries of a store are: sorted columns, searched for many keys at once.

Small stores have the columns in memory. Above `IN_MEMORY` entries they are merged into one file in a folder of this node, which
all ranks of the node map; entries that were added later are in memory until the next merge. The folder must be one that only
this user can write: whoever changes such a file chooses which bytes are read as which entry.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from smalti.system import load_json
from smalti_cache.entries import Form, forms_to_text
from smalti_cache.keys import Key, Keys
from smalti_cache.pack import BYTES_PER_ENTRY, COLUMNS, DTYPES, Columns, PackIndex

T = TypeVar("T")

_log = logging.getLogger(__name__)

IN_MEMORY = 1 << 17
"""Entries whose columns are kept in memory: 5 MB."""
_STEP = 1 << 17


@dataclass(frozen=True)
class Place:
    """Where one entry is."""

    file: str
    offset: int
    length: int
    crc: int
    form: Form


class Directory:
    """The entries of packs, by key. If several packs have an entry, any of them is found."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = folder
        self._name = name
        self._tables: list[Columns] = []
        self._mapped = 0
        self._packs: dict[str, int] = {}
        self.forms: list[Form] = []
        self.files: list[str] = []
        self._form_numbers: dict[Form, int] = {}
        self._file_numbers: dict[str, int] = {}
        self._damaged: dict[Key, set[tuple[str, int]]] = {}

    def __len__(self) -> int:
        """Entries; those that several packs have count several times."""
        return sum(len(table["high"]) for table in self._tables)

    @property
    def packs(self) -> frozenset[str]:
        return frozenset(self._packs)

    def add(self, packs: Iterable[tuple[Mapping[str, int], PackIndex]]) -> None:
        """Add indexes, each with the names and sizes of the packs that it is about."""
        waiting: list[Columns] = []
        count = 0
        for some, index in packs:
            forms = np.array([_number(form, self._form_numbers, self.forms) for form in index.forms] or [0], dtype="<u4")
            files = np.array([_number(file, self._file_numbers, self.files) for file in index.files], dtype="<u4")
            columns = dict(index.columns)
            columns |= {"form": forms[columns["form"]], "file": files[columns["file"]]}
            waiting.append(columns)
            self._packs |= some
            count += len(index)
            if count >= IN_MEMORY:
                self._append(waiting)
                waiting, count = [], 0
        self._append(waiting)

    def find(self, keys: Keys) -> NDArray[np.bool_]:
        """Returns for each key whether there is an entry."""
        found = np.zeros(len(keys), dtype=np.bool_)
        order = np.argsort(keys.high)  # in ascending order each page is touched once
        high, low = keys.high[order], keys.low[order]
        for table in self._tables:
            found[order] |= _search(table, high, low) >= 0
        for key in self._damaged:
            same = np.flatnonzero((keys.high == key[0]) & (keys.low == key[1]))
            found[same] &= self.place(key) is not None
        return found

    def place(self, key: Key) -> Place | None:
        """Returns where an entry is that is not known to be damaged."""
        damaged = self._damaged.get(key, ())
        return next((place for place in self._places(key) if (place.file, place.offset) not in damaged), None)

    def mark_damaged(self, key: Key, file: str, offset: int) -> None:
        """From now on the entry at this place counts as absent."""
        self._damaged.setdefault(key, set()).add((file, offset))

    def damaged(self, key: Key) -> frozenset[tuple[str, int]]:
        """Returns where damaged entries of this key are: files and offsets."""
        return frozenset(self._damaged.get(key, ()))

    @property
    def damaged_keys(self) -> tuple[Key, ...]:
        """The keys with a damaged entry; they may have an intact one too."""
        return tuple(self._damaged)

    def all_damaged(self) -> frozenset[tuple[Key, str, int]]:
        """Returns the damaged entries of all keys: key, file and offset."""
        return frozenset((key, file, offset) for key, places in self._damaged.items() for file, offset in places)

    def references(self, keys: Keys, names: Keys) -> PackIndex:
        """Returns references to the entries of `keys`, which all have to be there, under other keys."""
        columns: dict[str, NDArray[Any]] = {name: np.zeros(len(keys), dtype=DTYPES[kind]) for name, kind in COLUMNS.items()}
        open_ = np.ones(len(keys), dtype=np.bool_)
        for table in self._tables:
            rows = _search(table, keys.high, keys.low)
            here = open_ & (rows >= 0)
            for name in ("offset", "length", "crc", "form", "file"):
                columns[name][here] = table[name][rows[here]]
            open_ &= ~here
        assert not open_.any(), "references to entries that are not there"
        files, columns["file"] = np.unique(columns["file"], return_inverse=True)
        forms, columns["form"] = np.unique(columns["form"], return_inverse=True)
        return PackIndex(
            columns={**columns, "high": names.high, "low": names.low},
            forms=tuple(self.forms[number] for number in forms.tolist()),
            files=tuple(self.files[number] for number in files.tolist()),
        )

    def _places(self, key: Key) -> Iterator[Place]:
        high, low = (np.array([half], dtype=np.uint64) for half in key)
        for table in self._tables:
            row = int(_search(table, high, low)[0])
            while 0 <= row < len(table["high"]) and (int(table["high"][row]), int(table["low"][row])) == key:
                offset, length, crc, form, file = (
                    int(table[name][row]) for name in ("offset", "length", "crc", "form", "file")
                )
                yield Place(file=self.files[file], offset=offset, length=length, crc=crc, form=self.forms[form])
                row += 1

    def index(self) -> PackIndex:
        """Returns all that was added as one index."""
        forms, files = tuple(self.forms), tuple(self.files)
        return PackIndex(columns=_joined(self._tables), forms=forms, files=files, packs=dict(self._packs))

    def tables(self) -> tuple[Columns, ...]:
        """The columns of all entries, in several tables."""
        return tuple(self._tables)

    def open_merged(self, packs: dict[str, int]) -> None:
        """Map the merged file of another process if it has more packs than this one knows, and none but these."""
        if self._folder is None or not self._folder.is_dir() or write_problem(self._folder):
            return
        for path in sorted(self._folder.glob(f"{self._name}-*.index")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                header, columns = _map(path)
                if self._packs.items() < header["packs"].items() <= packs.items():
                    self._packs = {str(name): int(size) for name, size in header["packs"].items()}
                    self.forms = [Form.of_json(form) for form in header["forms"]]
                    self.files = [str(file) for file in header["files"]]
                    self._form_numbers = {form: number for number, form in enumerate(self.forms)}
                    self._file_numbers = {file: number for number, file in enumerate(self.files)}
                    self._tables, self._mapped = [columns], len(columns["high"])

    def merge(self) -> None:
        """Write a merged file if there is much that is not in one."""
        if self._folder is None or len(self) - self._mapped < IN_MEMORY:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            problem = write_problem(self._folder)
        except OSError as error:
            problem = f"{self._folder}: {error.strerror or error}"
        if problem:
            _log.warning("the index of cached entries stays in memory, %d bytes per entry: %s", BYTES_PER_ENTRY, problem)
            self._folder = None
            return
        packs = dict(sorted(self._packs.items()))
        digest = sha256(json.dumps([packs, self.files]).encode()).hexdigest()[:16]
        path = self._folder / f"{self._name}-{digest}.index"
        header = {"packs": packs, "files": self.files, "forms": load_json(forms_to_text(self.forms))}
        try:
            if not path.exists():
                _write(path, header, self._tables)
            _, columns = _map(path)
        except (OSError, ValueError, KeyError, TypeError):
            return  # the node has no room for it: the columns stay in memory
        self._tables, self._mapped = [columns], len(columns["high"])
        for other in self._folder.glob(f"{self._name}-*.index"):
            if other != path:
                other.unlink(missing_ok=True)  # an earlier merge; whoever maps it keeps it

    def remove_merged(self) -> None:
        """Remove the merged files on this node, as the store is removed."""
        if self._folder is None or not self._folder.is_dir():
            return
        with suppress(OSError):  # then they are removed with other temporary files
            for path in self._folder.glob(f"{self._name}-*.index"):
                path.unlink(missing_ok=True)

    def _append(self, tables: Sequence[Columns]) -> None:
        tables = [table for table in tables if len(table["high"])]
        if not tables:
            return
        self._tables.append(_joined(tables))


def default_folder() -> Path:
    """Returns the folder for merged files: this user's, below that of temporary files."""
    return Path(tempfile.gettempdir(), f"smalti-cache-indexes-{os.geteuid()}")


def write_problem(folder: Path) -> str:
    """Returns why other users could change files in a folder, "" if they cannot. Raises OSError."""
    for path in (folder, folder.parent):
        status = path.lstat() if path == folder else path.stat()
        mode = status.st_mode
        if path == folder and (not stat.S_ISDIR(mode) or status.st_uid != os.geteuid()):
            return f"{path} is not a folder of this user"
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and (path == folder or not mode & stat.S_ISVTX):
            return f"other users may write in {path} (chmod go-w)"
    return ""


def _joined(tables: Sequence[Columns]) -> Columns:
    """Returns the rows of tables, each of which is sorted by key, as one such table."""
    if len(tables) == 1:
        return tables[0]
    joined = {name: np.concatenate([table[name] for table in tables]) for name in COLUMNS}
    order = Keys(joined["high"], joined["low"]).order()
    return {name: column[order] for name, column in joined.items()}


def _number(value: T, numbers: dict[T, int], values: list[T]) -> int:
    """Returns the place of a value in a list, to which a new one is appended."""
    if value not in numbers:
        numbers[value] = len(values)
        values.append(value)
    return numbers[value]


def _search(table: Columns, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the row of each key, -1 where there is none; fastest for ascending keys."""
    column, lows = table["high"], table["low"]
    rows = np.searchsorted(column, high).astype(np.int64)
    result = np.full(len(high), -1, dtype=np.int64)
    open_ = np.flatnonzero(rows < len(column))
    while len(open_):  # more than once only where upper halves coincide
        at = rows[open_]
        same = column[at] == high[open_]
        open_, at = open_[same], at[same]
        match = lows[at] == low[open_]
        result[open_[match]] = at[match]
        open_ = open_[~match]
        rows[open_] += 1
        open_ = open_[rows[open_] < len(column)]
    return result


def _write(path: Path, header: dict[str, object], tables: Sequence[Columns]) -> None:
    """Merge sorted tables into one file, a range of keys at a time."""
    count = sum(len(table["high"]) for table in tables)
    text = json.dumps({**header, "count": count}).encode()
    text += b" " * (-(len(text) + 8) % 64)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + BYTES_PER_ENTRY * count)
        target = _columns(draft, 8 + len(text), count, "r+")
        steps = max(1, count // _STEP)
        limits = [(1 << 64) * step // steps for step in range(1, steps)]
        splits = [
            [0, *np.searchsorted(table["high"], np.array(limits, dtype=np.uint64)).tolist(), len(table["high"])]
            for table in tables
        ]
        start = 0
        for step in range(steps):
            some = [
                {name: table[name][split[step] : split[step + 1]] for name in COLUMNS}
                for table, split in zip(tables, splits, strict=True)
            ]
            joined = _joined(some)
            for name in COLUMNS:
                target[name][start : start + len(joined["high"])] = joined[name]
            start += len(joined["high"])
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _map(path: Path) -> tuple[dict[str, Any], Columns]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = load_json(file.read(min(length, path.stat().st_size)))
    if path.stat().st_size != 8 + length + BYTES_PER_ENTRY * header["count"]:
        raise ValueError(f"{path} is incomplete")
    return header, _columns(path, 8 + length, header["count"], "r")


def _columns(path: Path, start: int, count: int, mode: str) -> dict[str, NDArray[Any]]:
    found = {}
    for name, kind in COLUMNS.items():
        mapped = np.memmap(path, dtype=DTYPES[kind], mode=mode, offset=start, shape=(count,))  # type: ignore[call-overload]
        found[name] = mapped.view(np.ndarray)
        start += count * DTYPES[kind].itemsize
    return found
