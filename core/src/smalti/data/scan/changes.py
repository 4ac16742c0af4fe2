"""Which samples have changed since a checkpoint was saved: compares the indexes that the run kept with the present ones."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smalti.data.datasets.spec import file_name_of
from smalti.data.scan.identity import Identity
from smalti.data.scan.index import DatasetIndex, read_table
from smalti.system import link_or_copy

_log = logging.getLogger(__name__)
_COMPARED = ("key", "size", "width", "height", "content", "captions")
_ROWS = 1 << 17  # compared at once


def keep(identity: Identity, indexes: Sequence[DatasetIndex], directory: Path) -> None:
    """Keep copies of the indexes that a run trains on, which the next scan would replace; as hard links if possible.

    `directory` is the run's `data`. A copy that fails is logged: then a later change is reported without counts.
    """
    folder = _folder(identity, directory)
    for index in indexes:
        name = f"{file_name_of(index.dataset)}.arrow"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            link_or_copy(directory / name, folder / name)
        except OSError as error:
            _log.warning("the index of dataset %s is not kept for later resumes: %s", index.dataset, error)


def changes(then: Identity, indexes: Sequence[DatasetIndex], directory: Path) -> list[str] | None:
    """Returns the differences, such as "3 images have other content, first: cats/7.png"; None without the old indexes."""
    folder = _folder(then, directory)
    now = {index.dataset: index for index in indexes}
    found = [f"dataset {name} is new" for name in sorted(now.keys() - then.settings.keys())]
    found += [f"dataset {name} was removed" for name in sorted(then.settings.keys() - now.keys())]
    for name in sorted(now.keys() & then.settings.keys()):
        try:
            old = read_table(folder / f"{file_name_of(name)}.arrow")
        except (OSError, pa.ArrowInvalid):
            return None
        if not set(_COMPARED) <= set(old.column_names):  # of an older version
            return None
        if "place" not in old.column_names:
            from smalti.data.scan.earlier import without_longer_digests  # see `_compared`

            old = without_longer_digests(old)
        found += [str(change) for change in _totals(old.select(_COMPARED), now[name].table.select(_COMPARED)) if change.count]
    return found


def _folder(identity: Identity, directory: Path) -> Path:
    return directory / "trained" / identity.samples[:16]


@dataclass(frozen=True, kw_only=True)
class _Change:
    """One kind of change: how many samples of a dataset, and the first of them; `one` and `many` are singular and plural."""

    one: str
    many: str
    count: int
    first: str

    def plus(self, later: _Change) -> _Change:
        """With the same kind of change in later rows."""
        return replace(self, count=self.count + later.count, first=self.first or later.first)

    def __str__(self) -> str:
        return f"{self.count} {self.one if self.count == 1 else self.many}, first: {self.first}"


def _totals(old: pa.Table, new: pa.Table) -> list[_Change]:
    """The changes of all rows, which are compared some at a time."""
    totals: list[_Change] = []
    for some, others in _aligned(old, new):
        found = list(_compared(some.combine_chunks(), others.combine_chunks()))
        totals = [one.plus(other) for one, other in zip(totals, found, strict=True)] if totals else found
    return totals


def _aligned(old: pa.Table, new: pa.Table) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yields parts of both tables, of at most `_ROWS` rows, that hold the same range of keys."""
    tables, starts = (old, new), [0, 0]
    while any(start < len(table) for start, table in zip(starts, tables, strict=True)):
        last = [start + _ROWS - 1 for start in starts]
        ends = [_key(table, row) for table, row in zip(tables, last, strict=True) if row < len(table)]
        stops = [
            len(table) if not ends else _after(table, min(ends), start, min(start + _ROWS, len(table)))
            for table, start in zip(tables, starts, strict=True)
        ]
        yield old.slice(starts[0], stops[0] - starts[0]), new.slice(starts[1], stops[1] - starts[1])
        starts = stops


def _after(table: pa.Table, key: str, start: int, stop: int) -> int:
    """The first row from `start` to `stop` whose key is greater."""
    return bisect_right(range(stop), key, lo=start, key=lambda row: _key(table, row))


def _key(table: pa.Table, row: int) -> str:
    return str(table.column("key")[row].as_py())


def _compared(old: pa.Table, new: pa.Table) -> Iterator[_Change]:
    """A sample counts once as added, removed, usable or not, resized or replaced; changed captions count separately."""
    import pyarrow.compute as pc  # imported here: few runs need it, and it takes long

    old_keys, new_keys = (table.column("key").cast(pa.large_string()).combine_chunks() for table in (old, new))
    before = pc.index_in(new_keys, value_set=old_keys)  # the old row of each new one
    known = before.is_valid().to_numpy(zero_copy_only=False)
    was, now = before.drop_null().to_numpy(zero_copy_only=False), np.flatnonzero(known)

    def pair(column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return old.column(column).to_numpy()[was], new.column(column).to_numpy()[now]

    def differ(column: str) -> NDArray[np.bool_]:
        one, other = pair(column)
        return np.asarray(one != other)

    def captions_differ() -> NDArray[np.bool_]:
        one, other = (table.column("captions").take(rows).combine_chunks() for table, rows in ((old, was), (new, now)))
        counts = pc.list_value_length(one).to_numpy(), pc.list_value_length(other).to_numpy()
        same = counts[0] == counts[1]
        texts = [lists.filter(pa.array(same)).flatten() for lists in (one, other)]
        different: NDArray[np.bool_] = ~same
        owners = np.repeat(np.flatnonzero(same), counts[0][same])
        different[owners[pc.not_equal(*texts).to_numpy(zero_copy_only=False)]] = True
        return different

    def change(one: str, many: str, rows: NDArray[np.int64], keys: pa.Array = new_keys) -> _Change:
        return _Change(one=one, many=many, count=len(rows), first=str(keys[int(rows[0])].as_py()) if len(rows) else "")

    usable_then, usable_now = (widths > 0 for widths in pair("width"))
    usable, opened = usable_then & usable_now, np.logical_and(*pair("content"))
    resized = usable & (differ("width") | differ("height"))
    replaced = usable & ~resized & (differ("size") | opened & differ("content"))
    removed = np.flatnonzero(~pc.is_in(old_keys, value_set=new_keys).to_numpy(zero_copy_only=False))
    yield change("image was added", "images were added", np.flatnonzero(~known))
    yield change("image was removed", "images were removed", removed, old_keys)
    yield change("image can be used now", "images can be used now", now[usable_now & ~usable_then])
    yield change("image can no longer be used", "images can no longer be used", now[usable_then & ~usable_now])
    yield change("image size changed", "image sizes changed", now[resized])
    yield change("image has other content", "images have other content", now[replaced])
    yield change("caption changed", "captions changed", now[usable & captions_differ()])
