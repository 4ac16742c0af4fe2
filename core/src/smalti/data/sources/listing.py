"""The files of a storage as columns: no Python object per file where the storage lists columns too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

FILES = pa.schema([("key", pa.string()), ("size", pa.int64()), ("etag", pa.string())])
WINDOW = 1 << 16
"""Rows at a time: large enough that the cost per batch disappears, small enough for bounded memory."""


def visible(files: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The files of a listing that are not hidden, with the schema `FILES`, in batches of about `WINDOW` rows."""
    for batch in rebatched(files, FILES):
        hidden = pc.or_(pc.starts_with(batch.column("key"), "."), pc.match_substring(batch.column("key"), "/."))
        yield batch.filter(pc.invert(hidden)) if pc.any(hidden).as_py() else batch


def rebatched(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int = WINDOW) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least `rows`, but for the last one, and at most twice as many. Drops other columns."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            waiting.append(
                pa.RecordBatch.from_arrays([part.column(field.name).cast(field.type) for field in schema], schema=schema)
            )
            count += part.num_rows
            if count >= rows:
                yield joined(waiting, schema)
                waiting, count = [], 0
    if count:
        yield joined(waiting, schema)


def joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Batches as a single one."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches, schema=schema).combine_chunks()
    found = table.to_batches()
    return found[0] if found else pa.RecordBatch.from_pylist([], schema=schema)
