"""Keys of texts and where each text comes from: collected in one pass over all texts, then read a range of keys at a time."""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
from numpy.typing import NDArray

from smalti import UserError
from smalti_cache.keys import Keys

Rows = NDArray[np.void]

_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("source", "<i8")])
_IN_MEMORY = 1 << 19
"""Rows that are kept in memory, 12 MB; more are in a temporary file, which has no name."""


class TextKeys:
    """Keys whose upper halves are from `first` on and below `last`, in `count` ranges; each with a number, its source."""

    def __init__(self, first: int, last: int, count: int) -> None:
        limits = [first + (last - first) * number // count for number in range(count + 1)]
        self._first, self._last = np.uint64(first), np.uint64(last - 1)
        self._inner = np.array(limits[1:-1], dtype=np.uint64)
        self._waiting: list[Rows] = []
        self._file: IO[bytes] | None = None
        self._runs: list[NDArray[np.int64]] = []
        """Of each sorted run of the file, where its ranges begin, in bytes, and where the last one ends."""

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._inner) + 1

    def add(self, keys: Keys, sources: NDArray[np.int64]) -> None:
        """Keep those keys that are in the ranges. Raises UserError if the temporary file cannot be written."""
        chosen = (keys.high >= self._first) & (keys.high <= self._last)
        rows = np.empty(int(np.count_nonzero(chosen)), dtype=_ROW)
        rows["high"], rows["low"], rows["source"] = keys.high[chosen], keys.low[chosen], sources[chosen]
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) > _IN_MEMORY:
            self._write(np.concatenate(self._waiting))
            self._waiting = []

    def read(self, number: int) -> tuple[Keys, NDArray[np.int64]]:
        """Returns the keys of a range and their sources, in ascending order, each key once with the source that came first."""
        parts = [rows[self._number(rows) == number] for rows in self._waiting]
        for run in reversed(self._runs):
            assert self._file is not None
            self._file.seek(run[number])
            parts.insert(0, np.frombuffer(self._file.read(int(run[number + 1] - run[number])), dtype=_ROW))
        rows = np.concatenate([np.empty(0, dtype=_ROW), *parts])
        keys = Keys(rows["high"].copy(), rows["low"].copy())
        order = keys.order()
        keys, sources = keys[order], rows["source"][order]
        first = np.ones(len(keys), dtype=np.bool_)
        first[1:] = (keys.high[1:] != keys.high[:-1]) | (keys.low[1:] != keys.low[:-1])
        return keys[first], sources[first]

    def _number(self, rows: Rows) -> NDArray[np.intp]:
        return np.searchsorted(self._inner, rows["high"], side="right")

    def _write(self, rows: Rows) -> None:
        numbers = self._number(rows)
        order = np.argsort(numbers, kind="stable")
        begins = np.searchsorted(numbers[order], np.arange(len(self) + 1))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="smalti-texts-")  # noqa: SIM115 - open as long as this object
            start = self._file.seek(0, 2)
            self._file.write(rows[order].tobytes())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write the list of texts to encode below {tempfile.gettempdir()}: {error.strerror or error}",
                fix="free space there, 24 bytes for each text, or name another folder in TMPDIR",
            ) from error
        self._runs.append(start + begins * _ROW.itemsize)
