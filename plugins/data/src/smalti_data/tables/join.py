"""A table joined with the listing of a storage, in bounded memory: an external merge sort of columns.

The rows of the table become sorted runs in temporary files. The listing, which is sorted, passes through in windows; each is
compared with the rows whose names are not behind it. Names are ordered by code points, as keys are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from smalti.data import stems
from smalti_data.tables.columns import ROWS

RUN = 1 << 17
"""Rows of a run, which are sorted in memory."""
SHOWN = 3
_MOST = 1 << 19  # rows compared at once
_EMPTY = pa.RecordBatch.from_pylist([], schema=ROWS)


class Names:
    """A list of names that can be long: counted, the first ones kept, all of them written to a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self.first: list[str] = []
        self._file: TextIO | None = None
        if path is not None:
            path.unlink(missing_ok=True)  # of an earlier scan

    def add(self, names: pa.Array) -> None:
        if not len(names):
            return
        self.count += len(names)
        self.first += names.slice(0, SHOWN - len(self.first)).to_pylist()
        if self.path is not None:
            self._file = self._file or self.path.open("w")
            self._file.writelines(f"{name}\n" for name in names.to_pylist())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __str__(self) -> str:
        listed = f"; all in {self.path}" if self.path is not None and self.count > len(self.first) else ""
        return f"{self.count}, first: {', '.join(self.first)}{listed}"


class Join:
    """Rows of a table and files of a storage with the same name. Of several rows with one name, the first is taken.

    `by_stem`: the names in the table have no extension. `duplicates` counts rows whose name an earlier row has. Only what is in
    both is yielded; `rows_without_file` and `files_without_row` collect the rest.
    """

    def __init__(self, folder: Path, *, by_stem: bool, rows_without_file: Names, files_without_row: Names) -> None:
        self.rows = 0
        self.duplicates = 0
        self._rows_without_file = rows_without_file
        self._files_without_row = files_without_row
        self._by_stem = by_stem
        self._folder = folder
        self._runs: list[pa.RecordBatch] = []
        self._pages: list[mmap] = []
        self._at: list[int] = []
        self._carried = _EMPTY
        self._carried_matched: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take some rows of the table (`ROWS`), in the order of the table; names in any order."""
        for start in range(0, rows.num_rows, RUN):
            self._add_run(rows.slice(start, RUN))

    def results(self, listing: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yields files that have a row, in order, and for each its row. `listing` has the column `key`, sorted."""
        for window in listing:
            keys, start = window.column("key"), 0
            while start < len(keys):
                horizon, rows = self._next(keys[-1].as_py())
                end = len(keys) if horizon is None else _count(keys, start, horizon)
                yield from self._matched(window.slice(start, end - start), rows, horizon or keys[-1].as_py())
                start = end
        self._leave(np.zeros(self._carried.num_rows, dtype=bool))
        while (rows := self._next(None)[1]).num_rows:
            self._rows_without_file.add(self._reported(self._distinct(rows).column("name")))

    def _add_run(self, rows: pa.RecordBatch) -> None:
        if self._by_stem:  # with the dot, names sort as the keys of their files do
            names = pc.binary_join_element_wise(rows.column("name"), "", ".")
            rows = pa.RecordBatch.from_arrays([names, *rows.columns[1:]], schema=ROWS)
        rows = rows.take(pc.array_sort_indices(rows.column("name")))  # stable: the first of equal names stays the first
        path = self._folder / f"run-{len(self._runs)}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, ROWS) as writer:
            writer.write_batch(rows)
        with path.open("rb") as file:
            pages = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._pages.append(pages)
        self._runs.append(pa.ipc.open_file(pa.py_buffer(pages)).get_batch(0))
        self._at.append(0)
        self.rows += rows.num_rows

    def _matched(
        self, window: pa.RecordBatch, new: pa.RecordBatch, horizon: str
    ) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Compares the next files with the next rows; files behind the `horizon` come later."""
        rows = pa.concat_batches([self._carried, new])
        matched = np.concatenate((self._carried_matched, np.zeros(new.num_rows, dtype=bool)))
        names, keys = rows.column("name"), window.column("key")
        found = pc.index_in(stems(keys) if self._by_stem else keys, value_set=names)
        have, which = pc.is_valid(found), found.drop_null()
        matched[which.to_numpy()] = True
        if len(which) < len(keys):
            self._files_without_row.add(keys.filter(pc.invert(have)))
        if len(which):
            yield window.filter(have), rows.take(which)
        # A file behind the horizon belongs to a row in front of it only if the horizon begins with the stem: "a." of "a.b.jpg".
        stays = np.zeros(len(names), dtype=bool)
        if self._by_stem:
            beginnings = [horizon[: at + 1] for at, letter in enumerate(horizon) if letter == "."]
            stays[pc.index_in(pa.array(beginnings, pa.string()), value_set=names).drop_null().to_numpy()] = True
        self._carried, self._carried_matched = rows, matched | self._repeated(names, matched)
        self._leave(stays)

    def _leave(self, stays: NDArray[np.bool_]) -> None:
        """Let rows go that can have no more files; those that had none are reported."""
        gone = ~stays & ~self._carried_matched
        if gone.any():
            names = self._carried.column("name").filter(pa.array(gone))
            self._rows_without_file.add(self._reported(names.take(pc.array_sort_indices(names))))
        self._carried, self._carried_matched = self._carried.filter(pa.array(stays)), self._carried_matched[stays]

    def _next(self, last: str | None) -> tuple[str | None, pa.RecordBatch]:
        """Returns the next rows of all runs, and up to which name: `last` (None: all), or less if they are too many."""
        horizon, ends = last, self._ends(last)
        while sum(ends) - sum(self._at) > _MOST:
            longest = max(range(len(ends)), key=lambda run: ends[run] - self._at[run])
            middle = self._runs[longest].column("name")[(self._at[longest] + ends[longest]) // 2].as_py()
            if middle == horizon or (fewer := self._ends(middle)) == ends:
                break  # all have the same name
            horizon, ends = middle, fewer
        parts = [
            run.slice(start, end - start) for run, start, end in zip(self._runs, self._at, ends, strict=True) if end > start
        ]
        self._at = ends
        rows = pa.concat_batches(parts) if parts else _EMPTY
        for pages in self._pages:  # they count as memory of the process as long as they are mapped
            pages.madvise(MADV_DONTNEED)
        return horizon, rows

    def _ends(self, last: str | None) -> list[int]:
        """For each run the first row that is behind a name."""
        return [
            run.num_rows if last is None else _count(run.column("name"), start, last)
            for run, start in zip(self._runs, self._at, strict=True)
        ]

    def _distinct(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The first row of each name."""
        repeated = self._repeated(rows.column("name"), np.zeros(rows.num_rows, dtype=bool))
        return rows.filter(pa.array(~repeated)) if repeated.any() else rows

    def _repeated(self, names: pa.Array, matched: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows without a file have the name of an earlier row. Counts them."""
        repeated, rows = np.zeros(len(names), dtype=bool), np.flatnonzero(~matched)
        if len(rows):
            # Few rows have no file: the set of their names is small. `first` is the first row with each of those names.
            some = names.take(pa.array(rows))
            among = pc.index_in(names, value_set=some)
            first = np.full(len(rows), len(names))
            at = np.flatnonzero(_valid(among))[::-1]
            first[among.drop_null().to_numpy()[::-1]] = at
            repeated[rows] = first[pc.index_in(some, value_set=some).to_numpy()] != rows
            self.duplicates += int(repeated.sum())
        return repeated

    def _reported(self, names: pa.Array) -> pa.Array:
        return pc.utf8_slice_codeunits(names, 0, -1) if self._by_stem else names


def _valid(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(values.is_valid().to_numpy(zero_copy_only=False))


def _count(names: pa.Array, start: int, last: str) -> int:
    """The first position from `start` on that is behind a name; `names` are sorted."""
    stop = len(names)
    while start < stop:
        middle = (start + stop) // 2
        if names[middle].as_py() <= last:
            start = middle + 1
        else:
            stop = middle
    return start
