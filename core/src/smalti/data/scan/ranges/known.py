"""Which storages all ranks list, and where the last index says that their keys can be split."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import IndexFile
from smalti.data.scan.ranges.listing import CHUNK_ROWS, ListedByRanks
from smalti.data.scan.tasks import Handed
from smalti.data.storage.protocol import Storage


def listed_by_ranks(spec: DatasetSpec, storage: Storage, index: Path | None, handed: Handed | None) -> Storage:
    """Returns the storage as a source is to list it: by all ranks if they scan, and it lists ranges; otherwise itself.

    `index` is the path of the last index, which need not exist.
    """
    if handed is None or index is None or not storage.lists_ranges:
        return storage
    folder = index.with_name(f".{index.name}.listing")
    return ListedByRanks(storage, spec.id, handed, folder, known_bounds(spec, index, 2 * handed.ranks))


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
