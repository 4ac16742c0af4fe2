"""What is different in a scan by all ranks: who lists a storage, and who opens files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from smalti.data import (
    Catalog,
    DatasetIndex,
    DatasetSpec,
    IndexFile,
    Kept,
    MetadataSource,
    Rows,
    Storage,
    Threads,
    written,
)
from smalti_data.all_ranks.listing import CHUNK_ROWS, ListedByRanks
from smalti_data.all_ranks.tasks import Handed, Task, wait_for


@dataclass(frozen=True, kw_only=True)
class SharedCatalog(Catalog):
    """Its sources read what all ranks list, where a storage lists ranges. `directory` has the indexes."""

    directory: Path
    handed: Handed

    def open_source(self, spec: DatasetSpec, storage: Storage) -> MetadataSource:
        if storage.lists_ranges:
            index = self.directory / f"{spec.file_name}.arrow"
            folder = index.with_name(f".{index.name}.listing")
            storage = ListedByRanks(storage, spec.id, self.handed, folder, known_bounds(spec, index, 2 * self.handed.ranks))
        return super().open_source(spec, storage)


def known_bounds(spec: DatasetSpec, path: Path, pieces: int) -> list[str]:
    """Keys that split the files of the last index into equal ranges, none smaller than a task; none without an index."""
    try:
        file = IndexFile(path)
    except (OSError, pa.ArrowInvalid):
        return []
    if file.summary is None:
        return []
    index = DatasetIndex(spec.id, file, file.summary)
    pieces = min(pieces, len(index) // CHUNK_ROWS)
    return [index.key(len(index) * number // pieces) for number in range(1, pieces)]


def shared_rows(
    handed: Handed, rows: Rows, parts: Iterable[pa.RecordBatch], pool: Threads, kept: Kept
) -> Iterator[pa.RecordBatch]:
    """The rows of all parts, in order: some rank makes those for which files are opened. See `smalti.data.MakeRows`."""
    waiting: deque[pa.RecordBatch | Future[Path]] = deque()
    for part in parts:
        waiting.append(_submitted(handed, rows.spec, part, kept.next()) if rows.opens(part) else rows.of(part, pool)[0])
        while len(waiting) > handed.limit:
            yield _made(waiting.popleft())
    while waiting:
        yield _made(waiting.popleft())


def _submitted(handed: Handed, spec: DatasetSpec, part: pa.RecordBatch, path: Path) -> Future[Path]:
    listed = path.with_suffix(".listed")
    with written(listed) as file, pa.ipc.new_file(file, part.schema) as writer:
        writer.write_batch(part)
    return handed.submit(Task(dataset=spec.id, listed=str(listed), rows=str(path)))


def _made(part: pa.RecordBatch | Future[Path]) -> pa.RecordBatch:
    if isinstance(part, pa.RecordBatch):
        return part
    path = part.result()
    wait_for(path)
    return IndexFile(path).batch(0)
