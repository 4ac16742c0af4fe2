"""The index of a dataset: one row per sample, stored as a memory-mapped Arrow file.

A scan opens only files that are new or changed since the last scan, reads headers instead of whole images, and stores unusable
samples as rows with a reason. Rows are sorted by key. One process builds the index; every process may read it.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smalti.data.datasets.captions import depends_on_text_file, read_captions
from smalti.data.datasets.sources import Listed, MetadataSource, ReportsSkipped, describe_skipped
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.image_headers import EXTENSIONS, read_header
from smalti.data.scan.quarantine import BadSampleError, Quarantined
from smalti.data.storage.protocol import Storage, StorageError, TransientStorageError
from smalti.data.threads import Threads
from smalti.errors import UserError
from smalti.system import as_signed, derive_seed, text_hash

_log = logging.getLogger(__name__)

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("etag", pa.string()),
        ("size", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("caption_etag", pa.string()),
        ("content", pa.int64()),  # `Header.content`; 0 where no image was opened
        ("caption_hash", pa.int64()),  # of all captions
        ("problem", pa.string()),
    ]
)
_FORMAT = 2  # increase it when a scan finds something else in the same files
_BATCH = 4096  # rows per write
_CHUNK = 32  # rows per task of a thread

Progress = Callable[[int, int], None]
"""Called with the number of samples done and the total, every few thousand samples."""

Row = dict[str, object]


class DatasetIndex:
    """Read access to an index. Row numbers are stable as long as the dataset does not change."""

    def __init__(self, dataset: str, table: pa.Table) -> None:
        self.dataset = dataset
        self._table = table
        self.widths: NDArray[np.int32] = table.column("width").to_numpy()
        self.heights: NDArray[np.int32] = table.column("height").to_numpy()
        """Sizes in pixels by row; 0 in quarantined rows."""
        self.healthy: NDArray[np.int64] = np.flatnonzero(self.widths > 0)
        """The usable rows, ascending."""

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def key(self, row: int) -> str:
        return str(self._table.column("key")[row].as_py())

    def etag(self, row: int) -> str:
        """Changes with the content of the file: caches of what is made from it must compare it."""
        return str(self._table.column("etag")[row].as_py())

    def captions(self, row: int) -> tuple[str, ...]:
        return tuple(self._table.column("captions")[row].as_py())

    def keys(self) -> Iterator[str]:
        """The keys of all rows, in order."""
        for batch in self._table.column("key").chunks:
            yield from batch.to_pylist()

    def numbers(self, column: str) -> Iterator[NDArray[np.generic]]:
        """Yields a column of numbers in parts, in the order of the rows, without a copy."""
        for part in self._table.column(column).chunks:
            yield part.to_numpy(zero_copy_only=True)

    @property
    def table(self) -> pa.Table:
        """All columns, sorted by key."""
        return self._table

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The unusable samples, each with the reason."""
        rows = np.flatnonzero(self.widths == 0)
        problems = self._table.column("problem")
        return tuple(
            Quarantined(dataset=self.dataset, key=self.key(row), reason=problems[row].as_py()) for row in rows.tolist()
        )


def build_index(
    spec: DatasetSpec, storage: Storage, source: MetadataSource, cache: Path | None = None, progress: Progress | None = None
) -> DatasetIndex:
    """Scan a dataset; returns its index, which is also written to `cache` (only in memory if that is None).

    Rows of an earlier index in `cache` are reused where nothing changed. Unusable samples become rows with a reason. Raises
    UserError for a dataset without images, and TransientStorageError when the storage does not answer.
    """
    listed = _chosen(spec, source.list())
    if not listed:
        others = describe_skipped(source.skipped_files) if isinstance(source, ReportsSkipped) else ""
        raise UserError(
            f"dataset {spec.id!r}: no image found in {storage.location}" + (f", but other files: {others}" if others else ""),
            fix=f"check instance_data_dir, and that the file names end in {', '.join(sorted(EXTENSIONS))}",
        )
    schema = _SCHEMA.with_metadata({"smalti": _recipe(spec)})
    scan = _Scan(spec=spec, storage=storage, old=_old_table(cache, schema))
    batches = scan.batches(listed, progress)
    if cache is None:
        sink = pa.BufferOutputStream()
        _write(sink, schema, batches)
        return DatasetIndex(spec.id, pa.ipc.open_file(sink.getvalue()).read_all())
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_name(f".{cache.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            _write(file, schema, batches)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(cache)
    finally:
        draft.unlink(missing_ok=True)
    return load_index(spec, cache)


def load_index(spec: DatasetSpec, cache: Path) -> DatasetIndex:
    """Returns the index that another process built. Raises UserError if it is missing, or of another configuration."""
    fix = "build it first: smalti dataset scan, with the options of the run"
    try:
        table = read_table(cache)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"the index {cache} of dataset {spec.id!r} cannot be read: {error}", fix=fix) from error
    if table.schema.metadata != {b"smalti": _recipe(spec)}:
        raise UserError(f"the index {cache} was built for another configuration of dataset {spec.id!r}", fix=fix)
    return DatasetIndex(spec.id, table)


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """One pass over a dataset. `old` is its last index, None for the first scan."""

    spec: DatasetSpec
    storage: Storage
    old: pa.Table | None

    def batches(self, listed: list[Listed], progress: Progress | None) -> Iterator[list[Row]]:
        samples, done = iter(listed), 0
        # Mostly waiting for the disk or the network, so more threads than cores.
        with Threads(min(32, 4 * (os.cpu_count() or 1)), "smalti-scan") as pool:
            while some := list(islice(samples, _BATCH)):
                rows = partial(self._rows, known=self._known(some[0].key, some[-1].key))
                chunks = [some[start : start + _CHUNK] for start in range(0, len(some), _CHUNK)]
                yield list(chain.from_iterable(pool.map(rows, chunks)))
                done += len(some)
                if progress is not None:
                    progress(done, len(listed))

    def _known(self, first: str, last: str) -> dict[str, Row]:
        """Returns the usable rows of the old index from one key to another. Others are scanned again: they may be fixed."""
        if self.old is None:
            return {}
        keys = self.old.column("key")
        start = bisect_left(range(len(keys)), first, key=lambda row: str(keys[row].as_py()))
        stop = bisect_right(range(len(keys)), last, key=lambda row: str(keys[row].as_py()))
        rows: list[Row] = self.old.slice(start, stop - start).to_pylist()
        return {str(row["key"]): row for row in rows if not row["problem"]}

    def _rows(self, some: Sequence[Listed], known: Mapping[str, Row]) -> list[Row]:
        return [self._row(one, known.get(one.key)) for one in some]

    def _row(self, listed: Listed, old: Row | None) -> Row:
        """Returns the row of one sample: reused, or from its files."""
        row: Row = {"key": listed.key, "etag": listed.etag, "size": listed.size, "caption_etag": listed.caption_etag}
        try:
            if listed.problem:
                raise BadSampleError(listed.problem)
            row["captions"], row["caption_hash"] = self._captions(listed, old)
            row["width"], row["height"], row["content"] = self._image(listed, old)
            row["problem"] = ""
        except TransientStorageError:
            raise
        except (BadSampleError, StorageError) as error:
            row |= {"captions": [], "caption_hash": 0, "width": 0, "height": 0, "content": 0, "problem": _first_line(error)}
        return row

    def _captions(self, listed: Listed, old: Row | None) -> tuple[object, object]:
        """All captions, and their hash."""
        if old and depends_on_text_file(self.spec) and listed.caption_etag and old["caption_etag"] == listed.caption_etag:
            return old["captions"], old["caption_hash"]
        captions = read_captions(self.spec, self.storage, listed)  # cheap where no file is read
        return captions, as_signed(derive_seed(*captions))

    def _image(self, listed: Listed, old: Row | None) -> tuple[object, object, object]:
        """Width, height and content."""
        if listed.width is not None and listed.height is not None:
            return listed.width, listed.height, 0
        if old and old["etag"] == listed.etag:
            return old["width"], old["height"], old["content"]
        header = read_header(self.storage, listed.key, listed.size)
        return header.width, header.height, header.content


def _chosen(spec: DatasetSpec, listed: Iterable[Listed]) -> list[Listed]:
    """Returns all samples, or the `max_num_samples` with the smallest hashes: new files hardly change that choice."""
    if spec.max_num_samples is None:
        return sorted(listed, key=lambda one: one.key)
    chosen = heapq.nsmallest(
        spec.max_num_samples, listed, key=lambda one: (derive_seed("choose", spec.id, text_hash(one.key)), one.key)
    )
    return sorted(chosen, key=lambda one: one.key)


_LATER_FIELDS = ("caption_extension", "instance_prompt_fallback")
"""Recorded only where they are set, so that the indexes of earlier versions are reused."""


def _recipe(spec: DatasetSpec) -> bytes:
    """Everything that determines an index, except the files. An index of another recipe is not reused."""
    fields = {
        "metadata_backend", "json_table", "metadata_options", "caption_strategy",
        "disable_multiline_split", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "max_num_samples",
    }  # fmt: skip
    fields |= {name for name in _LATER_FIELDS if getattr(spec, name) != DatasetSpec.model_fields[name].default}
    return json.dumps({"format": _FORMAT} | spec.model_dump(mode="json", include=fields), sort_keys=True).encode()


def _old_table(cache: Path | None, schema: pa.Schema) -> pa.Table | None:
    """Returns the last index, if there is one and it was built by the same recipe."""
    if cache is None or not cache.exists():
        return None
    try:
        table = read_table(cache)
    except (OSError, pa.ArrowInvalid) as error:
        _log.warning("the index %s cannot be read (%s); it is rebuilt", cache, error)
        return None
    return table if table.schema.equals(schema, check_metadata=True) else None


def read_table(path: Path) -> pa.Table:
    """Returns an index as a table, mapped into memory. Raises OSError or pa.ArrowInvalid."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _write(sink: BinaryIO | pa.NativeFile, schema: pa.Schema, batches: Iterable[list[Row]]) -> None:
    with pa.ipc.new_file(sink, schema) as writer:
        for rows in batches:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))


def _first_line(error: Exception) -> str:
    message = error.message if isinstance(error, StorageError) else str(error)
    return message.partition("\n")[0]
