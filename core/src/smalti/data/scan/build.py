"""The scan of a dataset, which builds its index.

A scan opens only files that are new or changed since the last scan, reads headers instead of whole images, and stores unusable
samples as rows with a reason.
"""

from __future__ import annotations

import heapq
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from smalti.data.datasets.captions import depends_on_text_file, read_captions
from smalti.data.datasets.sources import Listed, MetadataSource, ReadsPlaces, ReportsSkipped, describe_skipped, listed_rows
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.image_headers import EXTENSIONS, read_header
from smalti.data.scan.index import DatasetIndex, load_index, read_table
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.scan.recipe import recipe_of, reusable_recipes
from smalti.data.storage.protocol import Storage, StorageError, TransientStorageError
from smalti.data.threads import Threads
from smalti.errors import UserError
from smalti.system import as_signed, derive_seed, text_hash

_log = logging.getLogger(__name__)

_BATCH = 4096  # rows per write
_CHUNK = 32  # rows per task of a thread

Progress = Callable[[int, int], None]
"""Called with the number of samples done and the total, every few thousand samples."""

Row = dict[str, object]


def build_index(
    spec: DatasetSpec, storage: Storage, source: MetadataSource, cache: Path | None = None, progress: Progress | None = None
) -> DatasetIndex:
    """Scan a dataset; returns its index, which is also written to `cache` (only in memory if that is None).

    Rows of an earlier index in `cache` are reused where nothing changed. Unusable samples become rows with a reason. Raises
    UserError for a dataset without images, and TransientStorageError when the storage does not answer.
    """
    listed = _chosen(spec, listed_rows(source))
    if not listed:
        others = describe_skipped(source.skipped_files) if isinstance(source, ReportsSkipped) else ""
        raise UserError(
            f"dataset {spec.id!r}: no image found in {storage.location}" + (f", but other files: {others}" if others else ""),
            fix=f"check instance_data_dir, and that the file names end in {', '.join(sorted(EXTENSIONS))}",
        )
    scan = _Scan(spec=spec, storage=storage, source=source, old=_old_table(cache, spec))
    batches = scan.batches(listed, progress)
    if cache is None:
        sink = pa.BufferOutputStream()
        _write(sink, spec, batches)
        index = IndexFile(sink.getvalue())
        assert index.summary is not None
        return DatasetIndex(spec.id, index, index.summary)
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_name(f".{cache.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            _write(file, spec, batches)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(cache)
    finally:
        draft.unlink(missing_ok=True)
    return load_index(spec, cache)


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """One pass over a dataset. `old` is its last index, None for the first scan."""

    spec: DatasetSpec
    storage: Storage
    source: MetadataSource
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
        row: Row = {name: getattr(listed, name) for name in ("key", "etag", "size", "caption_etag", "place")}
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
        if listed.place:
            assert isinstance(self.source, ReadsPlaces), f"{listed.key} has a place, but its source does not read places"
            header = read_header(cast(Storage, self.source), listed.place, listed.size)
        else:
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


def _old_table(cache: Path | None, spec: DatasetSpec) -> pa.Table | None:
    """Returns the last index, if there is one and it was built by the same recipe."""
    if cache is None or not cache.exists():
        return None
    try:
        table = read_table(cache)
    except (OSError, pa.ArrowInvalid) as error:
        _log.warning("the index %s cannot be read (%s); it is rebuilt", cache, error)
        return None
    return table if (table.schema.metadata or {}).get(b"smalti") in reusable_recipes(spec) else None


def _write(sink: BinaryIO | pa.NativeFile, spec: DatasetSpec, batches: Iterable[list[Row]]) -> None:
    with IndexWriter(sink, recipe_of(spec)) as writer:
        for rows in batches:
            writer.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def _first_line(error: Exception) -> str:
    message = error.message if isinstance(error, StorageError) else str(error)
    return message.partition("\n")[0]
