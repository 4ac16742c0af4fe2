"""Rows of earlier scans: the last index, and what a scan that was interrupted had finished. Unchanged rows are taken over."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.image_sizes import FIRST_READ
from smalti.data.scan.index_file import SCHEMA, IndexFile, reusable_recipes

_log = logging.getLogger(__name__)
T = TypeVar("T", pa.RecordBatch, pa.Table)


class EarlierRows:
    """The usable rows of some index files, found by key. Rows that were unusable are scanned again: they may be fixed."""

    def __init__(self, files: Sequence[IndexFile]) -> None:
        self._batches = [file.batch(number) for file in files for number in range(len(file)) if len(file.batch(number))]
        self._first = [str(batch.column("key")[0].as_py()) for batch in self._batches]
        self._last = [str(batch.column("key")[len(batch) - 1].as_py()) for batch in self._batches]

    @classmethod
    def open(cls, spec: DatasetSpec, paths: Sequence[Path]) -> EarlierRows:
        """From the files that exist and were built by the same recipe; earlier ones have precedence."""
        files = []
        for path in paths:
            try:
                file = IndexFile(path)
            except FileNotFoundError:
                continue
            except (OSError, pa.ArrowInvalid) as error:
                _log.warning("the index %s cannot be read (%s); it is rebuilt", path, error)
                continue
            if file.recipe in reusable_recipes(spec):
                files.append(file)
        return cls(files)

    def find(self, keys: pa.Array) -> pa.RecordBatch:
        """Returns a row for each key, with nulls where there is none. `keys` are sorted."""
        found, rows = [], []
        for part in self._between(str(keys[0].as_py()), str(keys[len(keys) - 1].as_py())):
            if (
                len(part) == len(keys)
                and part.column("key").equals(keys)
                and not pc.any(pc.not_equal(part.column("problem"), "")).as_py()
            ):
                return part
            part = part.filter(pc.equal(part.column("problem"), ""))
            positions = pc.index_in(part.column("key"), value_set=keys)
            if positions.null_count:
                part = part.filter(positions.is_valid())
                positions = positions.drop_null()
            if len(part):
                found.append(part)
                rows.append(positions.to_numpy())
        if not found:
            return pa.RecordBatch.from_arrays([pa.nulls(len(keys), field.type) for field in SCHEMA], schema=SCHEMA)
        rows_found = np.concatenate(rows)
        order = np.full(len(keys), -1, dtype=np.int64)
        order[rows_found[::-1]] = np.arange(len(rows_found))[::-1]  # of several rows with a key, the first
        matched = found[0] if len(found) == 1 else pa.concat_batches(found)
        if len(matched) == len(keys) and bool((order == np.arange(len(keys))).all()):
            return matched
        return matched.take(pa.array(order, mask=order < 0))

    def _between(self, first: str, last: str) -> Iterator[pa.RecordBatch]:
        for batch, begin, end in zip(self._batches, self._first, self._last, strict=True):
            if end < first or begin > last:
                continue
            column = batch.column("key")
            key, rows = partial(_text, column), range(len(column))
            start, stop = bisect_left(rows, first, key=key), bisect_right(rows, last, key=key)
            if stop > start:
                yield _completed(batch.slice(start, stop - start))


def _text(column: pa.Array, row: int) -> str:
    return str(column[row].as_py())


def _completed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of the present format."""
    names = batch.schema.names
    empty = {"place": pa.array([""]).take(pa.array(np.zeros(len(batch), dtype=np.int64)))}
    arrays = [batch.column(field.name) if field.name in names else empty[field.name] for field in SCHEMA]
    completed = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    return completed if "place" in names else without_longer_digests(completed)


def without_longer_digests(rows: T) -> T:
    """The rows of an index in format 2 with contents that compare with those of today.

    They were digests of 64 KiB. Those of files that are longer than what is read today become 0, which means unknown.
    """
    content = pc.if_else(pc.greater(rows.column("size"), FIRST_READ), 0, rows.column("content"))
    return rows.set_column(rows.schema.get_field_index("content"), rows.schema.field("content"), content)
