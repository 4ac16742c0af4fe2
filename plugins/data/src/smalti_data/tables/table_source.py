"""Datasets that a table describes: a table of any format joined with the files of the storage."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from smalti import UserError
from smalti.data import (
    EXTENSIONS,
    FILES,
    LISTED,
    DatasetSpec,
    ListedOnce,
    ListedState,
    ListingDigest,
    MetadataSource,
    Storage,
    StorageError,
    depends_on_text_file,
    rebatched,
    stems,
    visible,
)
from smalti_data.file_names import with_extension
from smalti_data.tables.columns import Projection, TableColumns, local_table
from smalti_data.tables.join import Join, Names


class Table(ABC):
    """A table of one format, opened. Read by columns, in batches of bounded memory."""

    location: str
    """The path or address, for messages."""

    schema: pa.Schema
    """Names and types of all columns."""

    identity: str = ""
    """Changes with the content: sizes with modification times or etags of its files when it was opened. "" is unknown."""

    @abstractmethod
    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows, with only some of the columns. Raises UserError for a damaged table."""


class TableSource(MetadataSource, ABC):
    """A metadata source that joins a table with the files of the storage. Only images with a row belong to the dataset.

    Rows without a file, and images without a row, are counted in the notices and listed in files of the folder that
    `use_folder` sets. A subclass opens the table.
    """

    format = ""
    """The name of the block in the dataset's entry, and the extension of the default table."""

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self._listing = ListedOnce(storage)
        self._folder: Path | None = None
        self._columns = TableColumns.of(spec.metadata_options, f"dataset {spec.id!r}: {self.format}")

    @abstractmethod
    def open(self, path: Path | None, key: str) -> Table:
        """Open the table: a file of this machine, or of the dataset's storage if `path` is None."""

    def use_folder(self, folder: Path) -> None:
        """Where lists and temporary files may be written; without it, nothing but files of the system's temporary folder."""
        self._folder = folder

    def check_table(self) -> None:
        self.rows(self._open())

    def is_unchanged(self, before: ListedState) -> bool:
        identity = self._open().identity
        if not identity or not self._listing.is_same(before.digest, *self._determining(identity)):
            return False
        self.notices = before.notices
        return True

    def _determining(self, identity: str) -> tuple[str, ...]:
        """What determines the samples beside the files. Absolute paths in a table depend on the dataset's folder; the order of
        columns with weights is not in the recipe.
        """
        return self._spec.id, identity, str(self._spec.instance_data_dir or ""), self._columns.model_dump_json()

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        self.listed_state = None
        table = self._open()
        rows = self.rows(table)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".join-", dir=self._folder))
        lists = [
            Names(self._folder / name if self._folder else None) for name in ("rows-without-file.txt", "files-without-row.txt")
        ]
        try:
            yield from self._joined(table, rows, temporary, *lists)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            for names in lists:
                names.close()

    def rows(self, table: Table) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The rows of the table (`ROWS`) in batches, and how many of each name no file. Raises UserError for wrong columns."""
        projection = Projection(
            self._columns,
            table.schema,
            table.location,
            captions=self._spec.caption_strategy == self._spec.metadata_backend and not self._spec.only_instance_prompt,
            weighted=bool(self._spec.caption_weights),
            root=str(self._spec.instance_data_dir or ""),
        )
        return map(projection.rows, table.batches(projection.names))

    def _joined(
        self, table: Table, rows: Iterator[tuple[pa.RecordBatch, int]], temporary: Path, lost: Names, unlisted: Names
    ) -> Iterator[pa.RecordBatch]:
        join: Join | None = None
        nameless = 0
        for batch, missing in rows:
            nameless += missing
            if join is None and batch.num_rows:
                join = Join(temporary, by_stem=self._by_stem(batch), rows_without_file=lost, files_without_row=unlisted)
            if join is not None:
                join.add(batch)
        if join is None:
            raise UserError(
                f"the table {table.location} has no row with a file name", fix=f"fill {self._columns.filename_column!r}"
            )
        found = 0
        texts = _Texts(self._storage, self._spec.caption_extension) if depends_on_text_file(self._spec) else None
        digest = ListingDigest()
        for listed, batch in join.results(map(with_extension, digest.passed(visible(self._listing.list_columns())))):
            found += listed.num_rows
            yield _listed(listed, batch, texts)
        if not found:
            raise self._nothing_matches(table, lost, unlisted)
        self.notices = tuple(self._described(table, join, nameless, lost, unlisted))
        if table.identity and (texts is None or texts.digest == digest.result()):
            self.listed_state = ListedState(digest=digest.result(*self._determining(table.identity)), notices=self.notices)

    def _by_stem(self, rows: pa.RecordBatch) -> bool:
        """Whether names have no extension: as the entry says, else most of the first names."""
        if self._columns.identifier_includes_extension is not None:
            return not self._columns.identifier_includes_extension
        names = rows.column("name").slice(0, 1000)
        one = pa.RecordBatch.from_arrays([names], names=["key"])
        return bool(2 * with_extension(one).num_rows < len(names))

    def _open(self) -> Table:
        given = self._columns.path
        path = local_table(given) if given is not None else None
        if path is not None and path.exists():
            try:
                return self.open(path, "")
            except OSError as error:
                fix = "give a file that can be read, and no pipe or device"
                message = f"dataset {self._spec.id!r}: the table {path} cannot be read: {error.strerror}"
                raise UserError(message, fix=fix) from error
        key = given or f"metadata.{self.format}"
        try:
            return self.open(None, key)
        except StorageError as error:
            where = f"{path} and " if path is not None else ""
            raise UserError(
                f"dataset {self._spec.id!r}: the table cannot be read: neither {where}{key} in {self._storage.location}",
                fix=f'set its path: "{self.format}": {{"path": ...}}',
            ) from error

    def _nothing_matches(self, table: Table, lost: Names, unlisted: Names) -> UserError:
        message = f"dataset {self._spec.id!r}: no image in {self._storage.location} has a row in {table.location}"
        if lost.first and unlisted.first:
            message += f": the table names {lost.first[0]!r}, there is {unlisted.first[0]!r}"
            fix = (
                "set filename_column to the column of paths relative to the dataset's folder, and identifier_includes_extension"
            )
            return UserError(message, fix=f"{fix} to whether they end in .jpg or the like")
        return UserError(message, fix=f"check instance_data_dir: its file names must end in {', '.join(sorted(EXTENSIONS))}")

    def _described(self, table: Table, join: Join, nameless: int, lost: Names, unlisted: Names) -> Iterator[str]:
        start = f"dataset {self._spec.id}: {table.location}:"
        if lost.count:
            yield f"{start} rows without an image: {lost}"
        if unlisted.count:
            yield f"{start} images without a row, which are left out: {unlisted}"
        if join.duplicates:
            yield f"{start} {join.duplicates} rows name an image of an earlier row, which is used"
        if nameless:
            yield f"{start} {nameless} rows name no image"


class _Texts:
    """The etags of the text files of a storage. Listed as a whole, in columns: about 100 bytes per file."""

    def __init__(self, storage: Storage, extension: str) -> None:
        digest = ListingDigest()
        batches = [with_extension(batch, (extension,)) for batch in digest.passed(visible(storage.list_columns()))]
        self.digest = digest.result()
        table = pa.Table.from_batches(list(rebatched(batches, FILES, 1 << 30)), schema=FILES).combine_chunks()
        self._stems, self._etags = stems(table.column("key").combine_chunks()), table.column("etag").combine_chunks()

    def etags(self, keys: pa.Array) -> pa.Array:
        """The etag of the text file of each image, "" without one."""
        return pc.fill_null(self._etags.take(pc.index_in(stems(keys), value_set=self._stems)), "")


def _listed(files: pa.RecordBatch, rows: pa.RecordBatch, texts: _Texts | None) -> pa.RecordBatch:
    none = pa.repeat(pa.scalar("", pa.string()), files.num_rows)
    columns = {
        **{field.name: files.column(field.name) for field in FILES},
        "captions": rows.column("captions"),
        "caption_etag": texts.etags(files.column("key")) if texts is not None else none,
        "width": rows.column("width"),
        "height": rows.column("height"),
        "place": none,
        "problem": none,
        "content": pa.nulls(files.num_rows, pa.int64()),
    }
    return pa.RecordBatch.from_arrays([columns[field.name] for field in LISTED], schema=LISTED)
