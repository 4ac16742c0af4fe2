"""What a source lists, in parts: batches of rows in order of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smalti.data.datasets.sources import LISTED
from smalti.data.datasets.spec import DatasetSpec
from smalti.system import derive_seeds, text_hash

PART_ROWS = 1 << 14
"""Rows of a part, which a scan that is interrupted does not do again."""
T = TypeVar("T")


def in_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, `PART_ROWS` at a time."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in map(_completed, batches):
        while len(batch):
            part = batch.slice(0, PART_ROWS - count)
            batch = batch.slice(len(part))
            waiting.append(part)
            count += len(part)
            if count == PART_ROWS:
                yield _joined(waiting)
                waiting, count = [], 0
    if waiting:
        yield _joined(waiting)


def chosen(spec: DatasetSpec, parts: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields all samples, or the `max_num_samples` with the smallest hashes: new files hardly change that choice."""
    if spec.max_num_samples is None:
        yield from parts
        return
    best = pa.RecordBatch.from_pylist([], schema=LISTED)
    hashes = np.zeros(0, dtype=np.uint64)
    for part in parts:
        texts = np.array([text_hash(key) for key in part.column("key").to_pylist()], dtype=np.uint64)
        best, hashes = pa.concat_batches([best, part]), np.concatenate((hashes, derive_seeds("choose", spec.id, last=texts)))
        if len(best) > 2 * spec.max_num_samples + PART_ROWS:
            best, hashes = _smallest(best, hashes, spec.max_num_samples)
    yield from in_parts([_smallest(best, hashes, spec.max_num_samples)[0]])


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item, and whether it is the last."""
    iterator = iter(items)
    for item in islice(iterator, 1):
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def _smallest(batch: pa.RecordBatch, hashes: NDArray[np.uint64], count: int) -> tuple[pa.RecordBatch, NDArray[np.uint64]]:
    rows = np.sort(np.argsort(hashes, kind="stable")[:count])
    return batch.take(pa.array(rows)), hashes[rows]


def _completed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With the column `content`, which plugins and files of earlier versions may not have."""
    if "content" in batch.schema.names:
        return batch
    return batch.append_column("content", pa.nulls(len(batch), pa.int64()))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch, of exactly the types of `LISTED`."""
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return cast(pa.RecordBatch, batch.select(LISTED.names).cast(LISTED))
