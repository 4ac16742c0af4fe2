"""The scan of a dataset, which builds its index.

A scan opens only files that are new or changed since the last scan, reads headers instead of whole images, and stores unusable
samples as rows with a reason. It goes through what the source lists in parts, in bounded memory. One that is interrupted
continues: finished parts for which files were opened are kept beside the index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from smalti.data.datasets.sources import MetadataSource, ReportsSkipped, describe_skipped
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.image_headers import EXTENSIONS
from smalti.data.scan.index import DatasetIndex, load_index
from smalti.data.scan.index_file import IndexFile, IndexWriter
from smalti.data.scan.parts import chosen, listed_parts, with_last
from smalti.data.scan.recipe import recipe_of
from smalti.data.storage.protocol import Storage
from smalti.data.threads import Threads
from smalti.errors import UserError
from smalti.system import remove_tree

Progress = Callable[[int, int | None], None]
"""Called with the number of samples done and the total, every few thousand samples; None while the total is not known."""


def build_index(
    spec: DatasetSpec, storage: Storage, source: MetadataSource, cache: Path | None = None, progress: Progress | None = None
) -> DatasetIndex:
    """Scan a dataset; returns its index, which is also written to `cache` (only in memory if that is None).

    Rows of an earlier index in `cache` are reused where nothing changed. Unusable samples become rows with a reason. Raises
    UserError for a dataset without images, and TransientStorageError when the storage does not answer.
    """
    if cache is None:
        sink = pa.BufferOutputStream()
        _scan(spec, storage, source, sink, Kept(None), [], progress)
        file = IndexFile(sink.getvalue())
        assert file.summary is not None
        return DatasetIndex(spec.id, file, file.summary)
    cache.parent.mkdir(parents=True, exist_ok=True)
    kept = Kept(cache)
    with _written(cache) as file_written:
        _scan(spec, storage, source, file_written, kept, [*kept.paths(), cache], progress)
    kept.remove()
    return load_index(spec, cache)


def _scan(
    spec: DatasetSpec,
    storage: Storage,
    source: MetadataSource,
    sink: BinaryIO | pa.NativeFile,
    kept: Kept,
    earlier: list[Path],
    progress: Progress | None,
) -> None:
    from smalti.data.scan.earlier import EarlierRows  # imported here: these import pyarrow.compute, which few processes need
    from smalti.data.scan.rows import Rows

    rows = Rows(spec=spec, storage=storage, source=source, earlier=EarlierRows.open(spec, earlier))
    done = 0
    # Mostly waiting for the disk or the network, so more threads than cores.
    with Threads(min(32, 4 * (os.cpu_count() or 1)), "smalti-scan") as pool, IndexWriter(sink, recipe_of(spec)) as writer:
        for part, is_last in with_last(chosen(spec, listed_parts(source))):
            made, opened = rows.of(part, pool)
            if opened:
                kept.add(spec, made)
            writer.write(made)
            done += len(part)
            if progress is not None:
                progress(done, done if is_last else None)
        if done == 0:
            raise no_images(spec, storage, source)


def no_images(spec: DatasetSpec, storage: Storage, source: MetadataSource) -> UserError:
    """The error for a dataset without images."""
    others = describe_skipped(source.skipped_files) if isinstance(source, ReportsSkipped) else ""
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

    def add(self, spec: DatasetSpec, rows: pa.RecordBatch) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(exist_ok=True)
        newest = self.paths()[:1]
        number = int(newest[0].stem) + 1 if newest else 0
        with _written(self.folder / f"{number:09}.arrow") as file, IndexWriter(file, recipe_of(spec)) as writer:
            writer.write(rows)

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
def _written(path: Path) -> Iterator[BinaryIO]:
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
