"""The scan of a dataset, which builds its index.

A scan opens only files that are new or changed since the last scan, reads headers instead of whole images, and stores unusable
samples as rows with a reason. It goes through what the source lists in parts, in bounded memory. One that is interrupted
continues: finished parts for which files were opened are kept beside the index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa

from smalti.data.datasets.columns import Column
from smalti.data.datasets.sources import MetadataSource, describe_skipped
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.image_sizes import EXTENSIONS
from smalti.data.scan.index import DatasetIndex, load_index
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter, recipe_of
from smalti.data.scan.parts import chosen, in_parts, with_last
from smalti.data.storage.columns import text_parts
from smalti.data.storage.protocol import Storage
from smalti.data.threads import Threads
from smalti.errors import UserError
from smalti.system import remove_tree

if TYPE_CHECKING:
    from smalti.data.scan.rows import Rows

Progress = Callable[[int, int | None], None]
"""Called with the number of samples done and the total, every few thousand samples; None while the total is not known."""
MakeRows = Callable[["Rows", Iterable[pa.RecordBatch], Threads, "Kept"], Iterator[pa.RecordBatch]]
"""Makes the rows of all parts of a listing, in order. What is `Kept` is not done again after an interruption."""


def make_rows(rows: Rows, parts: Iterable[pa.RecordBatch], pool: Threads, kept: Kept) -> Iterator[pa.RecordBatch]:
    """Make all rows in this process."""
    for part in parts:
        made, opened = rows.of(part, pool)
        if opened:
            kept.add(rows.spec, made)
        yield made


def build_index(
    spec: DatasetSpec,
    storage: Storage,
    source: MetadataSource,
    cache: Path | None = None,
    progress: Progress | None = None,
    make_rows: MakeRows = make_rows,
    columns: Iterable[Column] = (),
) -> DatasetIndex:
    """Scan a dataset; returns its index, which is also written to `cache` (only in memory if that is None).

    The index in `cache` is kept as it is if the source recognizes that nothing changed, unless it has images that could not
    be read, which are tried again, or what `columns` add. Otherwise its rows are reused where nothing changed. Unusable samples
    become rows with a reason.
    Raises UserError for a dataset without images, and TransientStorageError when the
    storage does not answer.
    """
    adding = [column for column in columns if column.fields]
    if cache is None:
        sink = pa.BufferOutputStream()
        _Scan(spec, storage, source, Kept(None), make_rows, adding).write(sink, [], progress)
        file = IndexFile(sink.getvalue())
        assert file.summary is not None
        return DatasetIndex(spec.id, file, file.summary)
    cache.parent.mkdir(parents=True, exist_ok=True)
    kept = Kept(cache)
    same = None if adding else _unchanged(spec, source, cache)
    if same is not None:
        kept.remove()
        if progress is not None:
            progress(len(same), len(same))
        return same
    with written(cache) as file_written:
        _Scan(spec, storage, source, kept, make_rows, adding).write(file_written, [*kept.paths(), cache], progress)
    kept.remove()
    return load_index(spec, cache)


def _unchanged(spec: DatasetSpec, source: MetadataSource, cache: Path) -> DatasetIndex | None:
    """The last index, if a scan would make the same one."""
    try:
        file = IndexFile(cache)
    except (OSError, pa.ArrowInvalid):
        return None
    before = file.summary
    if file.recipe != recipe_of(spec) or before is None or before.source is None or not source.is_unchanged(before.source):
        return None
    return DatasetIndex(spec.id, file, before)


@dataclass(frozen=True)
class _Scan:
    """One pass over a dataset."""

    spec: DatasetSpec
    storage: Storage
    source: MetadataSource
    kept: Kept
    make_rows: MakeRows
    columns: Sequence[Column] = ()
    problems: list[int] = field(default_factory=list)
    """How many samples of each part the source lists as unusable."""

    def write(self, sink: BinaryIO | pa.NativeFile, earlier: list[Path], progress: Progress | None) -> None:
        """Scan, and write the index. `earlier` are files with rows that may be reused."""
        from smalti.data.scan.earlier import EarlierRows  # imported here: few processes need pyarrow.compute
        from smalti.data.scan.rows import Rows, without_caption

        rows = Rows(spec=self.spec, storage=self.storage, source=self.source, earlier=EarlierRows.open(self.spec, earlier))
        done = 0
        others = [field for column in self.columns for field in column.fields]
        with reading_threads() as pool, IndexWriter(sink, recipe_of(self.spec), others) as writer:
            for made, is_last in with_last(self.make_rows(rows, self._parts(), pool, self.kept)):
                writer.write(made)
                done += len(made)
                writer.lasting_problems += without_caption(made)
                if progress is not None:
                    progress(done, done if is_last else None)
            if done == 0:
                raise no_images(self.spec, self.storage, self.source)
            writer.source = self.source.listed_state
            writer.lasting_problems += sum(self.problems)

    def _parts(self) -> Iterator[pa.RecordBatch]:
        """What the source lists, with what columns add, and with its problems counted."""
        for part in chosen(self.spec, in_parts(self.source.list_columns())):
            for column in self.columns:
                part = column.listed(part)
            self.problems.append(int(np.count_nonzero(text_parts(part.column("problem"))[1])))
            yield part


def reading_threads() -> Threads:
    """Mostly waiting for the disk or the network, so more threads than cores."""
    return Threads(min(32, 4 * (os.cpu_count() or 1)), "smalti-scan")


def no_images(spec: DatasetSpec, storage: Storage, source: MetadataSource) -> UserError:
    """The error for a dataset without images."""
    others = describe_skipped(source.skipped_files)
    return UserError(
        f"dataset {spec.id!r}: no image found in {storage.location}" + (f", but other files: {others}" if others else ""),
        fix=f"check instance_data_dir, and that the file names end in {', '.join(sorted(EXTENSIONS))}",
    )


@dataclass(frozen=True)
class Kept:
    """The finished parts of a scan of the index `cache`, in a folder beside it; without a `cache`, none are kept."""

    cache: Path | None

    @property
    def folder(self) -> Path | None:
        return None if self.cache is None else self.cache.with_name(f".{self.cache.name}.building")

    def paths(self) -> list[Path]:
        """The finished parts, newest first."""
        return [] if self.folder is None else sorted(self.folder.glob("[0-9]*.arrow"), reverse=True)

    def next(self) -> Path:
        """The path of another part."""
        assert self.folder is not None
        self.folder.mkdir(exist_ok=True)
        numbers = [int(path.stem) for path in self.folder.glob("[0-9]*")]
        return self.folder / f"{max(numbers, default=-1) + 1:09}.arrow"

    def add(self, spec: DatasetSpec, rows: pa.RecordBatch) -> None:
        if self.folder is not None:
            write_rows(self.next(), spec, rows)

    def remove(self) -> None:
        """Remove them, and what processes that were killed have left of the index."""
        for draft in [] if self.cache is None else self.cache.parent.glob(f".{self.cache.name}.[0-9]*"):
            if not _is_running(int(draft.suffix[1:])):
                draft.unlink(missing_ok=True)
        if self.folder is not None and self.folder.exists():
            remove_tree(self.folder)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` at the end, once it is on the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_rows(path: Path, spec: DatasetSpec, rows: pa.RecordBatch) -> None:
    """Write the rows of a part of an index to a file of their own, as `Kept` finds them."""
    with written(path) as file, IndexWriter(file, recipe_of(spec), list(rows.schema)[len(SCHEMA) :]) as writer:
        writer.write(rows)
