"""`metadata_backend: json`: the images of a storage that a JSON-lines table describes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from smalti import UserError
from smalti.data import (
    LISTED,
    DatasetSpec,
    ImageFiles,
    ListedOnce,
    ListedState,
    MetadataSource,
    MissingFileError,
    Storage,
)
from smalti.system import open_regular
from smalti_data.identity import file_identity, stored_identity
from smalti_data.json_lines import LINES, Lines, blocks_of
from smalti_data.tables.columns import ROWS, TableColumns
from smalti_data.tables.table_source import Table, TableSource

_DEFAULT_TABLE = "metadata.jsonl"
_NO_LINES = pa.RecordBatch.from_pylist([], schema=LINES)
_CHUNK = 8 << 20


class LineTable(Table):
    """A table with one JSON object per line, as batches of `LINES`; its columns are named in the dataset's `json` block.

    Raises UserError if it cannot be read.
    """

    schema = LINES

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._path = spec.json_table.path
        self._storage = storage
        self.location = str(self._path) if self._path else f"{storage.location}/{_DEFAULT_TABLE}"
        self.lines = Lines(spec.json_table, self.location, weighted=bool(spec.caption_weights))
        with self._explained():
            file = file_identity(self._path) if self._path else stored_identity(storage, _DEFAULT_TABLE)
        self.identity = f"{file}\n{spec.json_table.model_dump_json()}"  # the order of columns with weights is not in the recipe

    def batches(self, names: Sequence[str] = LINES.names) -> Iterator[pa.RecordBatch]:
        with self._explained():
            yield from self.lines.batches(blocks_of(self._chunks()))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MissingFileError) as error:
            fix = 'create the table, or set its path: "json": {"path": ...}'
            raise UserError(f"the metadata table {self.location} cannot be read", fix=fix) from error

    def _chunks(self) -> Iterator[bytes]:
        if self._path:
            with open_regular(self._path) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
            return
        start, chunk = 0, b" " * _CHUNK
        while len(chunk) == _CHUNK:
            chunk = self._storage.read_range(_DEFAULT_TABLE, start, _CHUNK)
            start += len(chunk)
            yield chunk


class JsonLines(MetadataSource):
    """The images that the lines of a table name.

    The storage is listed as well, for file sizes and etags. A line whose file is missing is quarantined; an image without a
    line is not part of the dataset.
    """

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self._listing = ListedOnce(storage)

    def check_table(self) -> None:
        LineTable(self._spec, self._storage)

    def is_unchanged(self, before: ListedState) -> bool:
        return self._listing.is_same(before.digest, self._spec.id, LineTable(self._spec, self._storage).identity)

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        table, self.listed_state = LineTable(self._spec, self._storage), None
        with tempfile.TemporaryDirectory(prefix="smalti-table-") as folder:
            runs = [_sorted_run(batch, Path(folder, str(number))) for number, batch in enumerate(table.batches())]
            images = ImageFiles(self._listing, self._spec.caption_extension)
            for files in images.batches():
                last = str(files.column("key")[len(files) - 1].as_py())
                yield from self._joined(table, [run.until(last) for run in runs], files)
            while rest := [part for run in runs if len(part := run.until(None))]:
                last = min(str(part.column("name")[len(part) - 1].as_py()) for part in rest)
                for run in runs:
                    run.back()
                yield from self._joined(table, [run.until(last) for run in runs], None)
        self.listed_state = ListedState(digest=images.digest.result(self._spec.id, table.identity))

    def _joined(
        self, table: LineTable, parts: Sequence[pa.RecordBatch], files: pa.RecordBatch | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the index for some lines of the table, whose images are among `files` if they are there."""
        rows = pa.concat_batches([_NO_LINES, *parts])
        if not len(rows):
            return
        rows = rows.take(pc.sort_indices(rows.column("name"))) if len(parts) > 1 else rows
        names = rows.column("name")
        again = pc.equal(names.slice(1), names.slice(0, len(names) - 1))
        if pc.any(again).as_py():
            raise table.lines.twice(names.slice(1).filter(again), rows.column("line").slice(1).filter(again))
        known = files.column("key") if files is not None else pa.array([], pa.string())
        found = pc.index_in(names, value_set=known)
        there = found.is_valid()
        nowhere = f"listed in {table.location}, but the image is missing"
        columns = {name: _filled(files, name, found) for name in ("size", "etag", "caption_etag")}
        empty = pa.array([""]).take(pa.array(np.zeros(len(rows), dtype=np.int64)))
        columns |= {"key": names, "place": empty, "problem": pc.if_else(there, "", nowhere)}
        columns |= {name: rows.column(name) for name in ("captions", "width", "height")}
        columns["content"] = pa.nulls(len(rows), pa.int64())
        yield pa.RecordBatch.from_arrays([columns[name] for name in LISTED.names], schema=LISTED)


def open_json(spec: DatasetSpec, storage: Storage) -> MetadataSource:
    """The source of a dataset, by whether the names in its table have an extension."""
    return JsonLines(spec, storage) if spec.json_table.identifier_includes_extension else JsonStems(spec, storage)


class JsonStems(TableSource):
    """A table of names without extension, which are joined with the files as in other tables."""

    format = "json"

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        super().__init__(spec, storage)
        self._columns = TableColumns(identifier_includes_extension=False, filename_column=spec.json_table.filename_column)

    def open(self, path: Path | None = None, key: str = "") -> Table:
        return LineTable(self._spec, self._storage)

    _open = open

    def rows(self, table: Table) -> Iterator[tuple[pa.RecordBatch, int]]:
        return ((batch.select(ROWS.names), 0) for batch in table.batches(LINES.names))


class _Run:
    """Lines in order of their names, read from the first to the last."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._names = rows.column("name")
        self._start = self._before = 0

    def until(self, last: str | None) -> pa.RecordBatch:
        """The next lines, up to the name `last`; without one, some of the next."""
        self._before = start = self._start
        stop = min(len(self._rows), start + (1 << 16)) if last is None else self._after(last)
        self._start = stop
        return self._rows.slice(start, stop - start)

    def back(self) -> None:
        """What `until` returned last will come again."""
        self._start = self._before

    def _after(self, last: str) -> int:
        low, high = self._start, len(self._rows)
        while low < high:
            middle = (low + high) // 2
            if str(self._names[middle].as_py()) <= last:
                low = middle + 1
            else:
                high = middle
        return low


def _sorted_run(batch: pa.RecordBatch, path: Path) -> _Run:
    """The lines sorted by name, in a temporary file that is mapped into memory."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, LINES) as writer:
        writer.write_batch(batch.take(pc.sort_indices(batch.column("name"))))
    return _Run(pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0))


def _filled(files: pa.RecordBatch | None, name: str, rows: pa.Array) -> pa.Array:
    """A column of the files at these rows, with 0 or "" where there is no row."""
    kind = LISTED.field(name).type
    values = files.column(name).take(rows) if files is not None else pa.nulls(len(rows), kind)
    return pc.fill_null(values, "" if kind == pa.string() else 0)
