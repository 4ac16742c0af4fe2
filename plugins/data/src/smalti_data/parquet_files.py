"""Parquet files, of this machine or of a storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from smalti import UserError
from smalti.data import LocalStorage, Storage
from smalti.system import open_regular
from smalti_data.range_file import RangeFile

_BUFFER = 1 << 20

OpenedParquet = Callable[[], pq.ParquetFile]


def parquet_at(path: Path) -> OpenedParquet:
    """A file of this machine."""

    def opened() -> pq.ParquetFile:
        open_regular(path).close()  # raises OSError for a pipe, which would be waited for
        return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)

    return opened


def parquet_in(storage: Storage, key: str, size: int) -> OpenedParquet:
    """A file of a storage, read by ranges."""
    if isinstance(storage, LocalStorage):
        return parquet_at(Path(storage.location, key))
    return lambda: pq.ParquetFile(pa.PythonFile(RangeFile(storage, key, size), mode="r"), buffer_size=_BUFFER, pre_buffer=False)


@contextmanager
def explained_parquet(location: str) -> Iterator[None]:
    """Converts errors of a damaged or missing file to UserError; a StorageError is one already."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        fix = "write or download it again, and check that it is complete: a parquet file ends with PAR1"
        fix = '"metadata_backend": "json", which reads lines of JSON' if location.endswith((".json", ".jsonl")) else fix
        raise UserError(f"{location} is not a readable parquet file: {str(error).splitlines()[0]}", fix=fix) from error


def parquet_batches(files: Sequence[tuple[str, OpenedParquet]], names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of files with one schema, with only some of the columns, at most `rows` at a time."""
    for location, opened in files:
        with explained_parquet(location), opened() as file:
            if missing := [name for name in names if name.split(".")[0] not in file.schema_arrow.names]:
                fix = "give files with the same columns, or the path of one file"
                raise UserError(f"{location} has no column {missing[0]!r}, which the first file has", fix=fix)
            yield from file.iter_batches(batch_size=rows, columns=list(names), use_threads=False)
