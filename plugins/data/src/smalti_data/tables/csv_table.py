"""Tables as text: `metadata_backend: csv` reads CSV, and TSV by the extension of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv

from smalti import UserError
from smalti.data import Storage
from smalti_data.identity import file_identity, stored_identity
from smalti_data.range_file import RangeFile
from smalti_data.tables.table_source import Table, TableSource

_BLOCK = 4 << 20


class CsvSource(TableSource):
    """The images of a storage that a CSV file describes. The first line names the columns."""

    format = "csv"

    def open(self, path: Path | None, key: str) -> Table:
        return CsvTable(path) if path is not None else CsvTable((self._storage, key))


class CsvTable(Table):
    """A CSV file of this machine, or of a storage. Texts are read as they are; an empty field is an empty text."""

    def __init__(self, file: Path | tuple[Storage, str]) -> None:
        self._file = file
        if isinstance(file, Path):
            self.location, self._size, self.identity = str(file), file.stat().st_size, file_identity(file)
        else:
            storage, key = file
            self.location, self._size = f"{storage.location}/{key}", storage.stat(key).size
            self.identity = stored_identity(storage, key)
        self._delimiter = "\t" if self.location.lower().endswith(".tsv") else ","
        with self._opened(None) as reader:
            self.schema = reader.schema

    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        row = 1
        try:
            with self._opened(names) as reader:
                for batch in reader:
                    row += batch.num_rows
                    yield batch
        except (pa.ArrowInvalid, OSError) as error:
            fix = "correct the table; texts with commas or line breaks are written in double quotes"
            raise UserError(f"the table {self.location} cannot be read after row {row}: {error}", fix=fix) from error

    def _opened(self, names: list[str] | None) -> csv.CSVStreamingReader:
        numbers = [] if names is None else [name for name in names if _is_number(self.schema.field(name).type)]
        kinds = {name: pa.string() for name in names or () if name not in numbers}
        source = self._file if isinstance(self._file, Path) else pa.PythonFile(RangeFile(*self._file, self._size), mode="r")
        try:
            return csv.open_csv(
                source,
                csv.ReadOptions(use_threads=False, block_size=_BLOCK),
                csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                csv.ConvertOptions(include_columns=names, column_types={**kinds, **dict.fromkeys(numbers, pa.float64())}),
            )
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"the table {self.location} is not a readable CSV file: {error}", fix="correct the table"
            ) from error


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
