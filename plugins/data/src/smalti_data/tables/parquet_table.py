"""`metadata_backend: parquet`: captions and sizes of images from parquet tables, local or in the dataset's storage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from smalti import UserError
from smalti.data import (
    DatasetSpec,
    MetadataSource,
    MissingFileError,
    Storage,
)
from smalti_data.archives.row_images import RowImages
from smalti_data.identity import file_identity
from smalti_data.parquet_files import OpenedParquet, explained_parquet, parquet_at, parquet_batches, parquet_in
from smalti_data.tables.table_source import Table, TableSource

_ROWS = 1 << 17


def open_parquet(spec: DatasetSpec, storage: Storage) -> MetadataSource:
    """The source of a dataset: a table beside the images, or, with `image_column`, parquet files with the images in them."""
    if "image_column" in spec.metadata_options:
        return RowImages(spec, storage)
    return ParquetSource(spec, storage)


class ParquetSource(TableSource):
    """The images of a storage that parquet files describe: one file, or all below a folder."""

    format = "parquet"

    def open(self, path: Path | None, key: str) -> Table:
        if path is not None:
            paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
            if not paths:
                raise UserError(f"no parquet file in {path}", fix='set the path of the table: "parquet": {"path": ...}')
            found = [(str(each), parquet_at(each)) for each in paths]
            return ParquetTable(str(path), found, "\n".join(map(file_identity, paths)))
        try:
            files = [self._storage.stat(key)]
        except MissingFileError:
            files = [file for file in self._storage.list(f"{key.rstrip('/')}/") if file.key.lower().endswith(".parquet")]
            if not files:
                raise
        location = self._storage.location
        found = [(f"{location}/{file.key}", parquet_in(self._storage, file.key, file.size)) for file in files]
        identity = "\n".join(f"{location}/{file.key}:{file.size}:{file.etag}" for file in files)
        return ParquetTable(f"{location}/{key}", found, identity)


class ParquetTable(Table):
    """Parquet files with one schema, as one table."""

    def __init__(self, location: str, files: list[tuple[str, OpenedParquet]], identity: str = "") -> None:
        self.location = location
        self.identity = identity
        self._files = files

    @cached_property
    def schema(self) -> pa.Schema:
        location, opened = self._files[0]
        with explained_parquet(location), opened() as file:
            return file.schema_arrow

    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        return parquet_batches(self._files, names, _ROWS)
