"""Which keys two indexes have in common, without holding the keys of either."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smalti.data.scan.index import DatasetIndex

_FEW = 64  # each key is searched for if the other index has this many times as many


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many samples are in both, and the key of the first one."""

    count: int
    first: str


def overlap(one: DatasetIndex, other: DatasetIndex, folder: str = "") -> Overlap:
    """Compares the keys of `one` with those of `other`, to which `folder` (such as "eval/") is added first."""
    start, stop = _range(one, folder)
    if stop - start > _FEW * len(other):
        return _searched((folder + other.key(row) for row in range(len(other))), one)
    if len(other) > _FEW * (stop - start):
        return _searched((one.key(row).removeprefix(folder) for row in range(start, stop)), other)
    return _compared(one, other, folder)


def _range(index: DatasetIndex, folder: str) -> tuple[int, int]:
    """The rows of the keys in a folder."""
    if not folder:
        return 0, len(index)
    return first_row(index, folder), first_row(index, folder[:-1] + chr(ord(folder[-1]) + 1))


def first_row(index: DatasetIndex, key: str, start: int = 0) -> int:
    """The first row from `start` whose key is not less."""
    stop = len(index)
    while start < stop:
        middle = (start + stop) // 2
        if index.key(middle) < key:
            start = middle + 1
        else:
            stop = middle
    return start


def _searched(keys: Iterable[str], index: DatasetIndex) -> Overlap:
    """Looks for each key, in ascending order, in an index."""
    row, found = 0, Overlap(count=0, first="")
    for key in keys:
        row = first_row(index, key, row)
        if row < len(index) and index.key(row) == key:
            found = Overlap(count=found.count + 1, first=found.first or key)
    return found


def _compared(one: DatasetIndex, other: DatasetIndex, folder: str) -> Overlap:
    """Compares batch by batch, as far as their keys may be the same."""
    import pyarrow.compute as pc  # imported here: few runs need it, and it takes long

    found = Overlap(count=0, first="")
    for batch in other.batches("key"):
        keys = batch.columns["key"]
        keys = pc.binary_join_element_wise(folder, keys, "") if folder else keys
        start = first_row(one, str(keys[0].as_py()))
        stop = min(first_row(one, str(keys[-1].as_py()), start) + 1, len(one))
        for piece in one.batches("key"):
            first, last = max(start - piece.start, 0), min(stop - piece.start, len(piece))
            if first >= last:
                continue
            mine = piece.columns["key"].slice(first, last - first)
            both = mine.filter(pc.is_in(mine, value_set=keys))
            if len(both):
                found = Overlap(count=found.count + len(both), first=found.first or str(both[0].as_py()))
    return found
