"""The index of a dataset: one row per sample, stored as a memory-mapped Arrow file.

Rows are sorted by key. `build` makes the index; every process may read it. Opening one costs the same for any number of rows:
do not read whole columns into memory (`Table.take` and `ChunkedArray.to_numpy` copy them), but batch by batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.index_file import IndexDigests, IndexFile, Summary, recipe_of
from smalti.data.scan.quarantine import Quarantined
from smalti.errors import UserError
from smalti.system import as_signed, derive_seed


@dataclass(frozen=True, kw_only=True)
class IndexBatch:
    """Consecutive rows of an index, from row `start`: the requested columns by name, mapped, without nulls."""

    start: int
    columns: dict[str, pa.Array]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class DatasetIndex:
    """Read access to an index. Row numbers are stable as long as the dataset does not change.

    A row that cannot be used has the size (0, 0) and no captions.
    """

    def __init__(self, dataset: str, file: IndexFile, summary: Summary) -> None:
        self.dataset = dataset
        self._file = file
        self._starts = summary.starts
        self.unusable = summary.unusable
        """How many rows cannot be used."""
        self.digests: IndexDigests = summary.digests
        self._columns: dict[tuple[str, int], pa.Array] = {}

    def named(self, dataset: str) -> DatasetIndex:
        """The same rows, as those of another dataset."""
        other = copy(self)
        other.dataset = dataset
        return other

    def __len__(self) -> int:
        return self._starts[-1]

    def key(self, row: int) -> str:
        return str(self._value("key", row).as_py())

    def etag(self, row: int) -> str:
        """Changes with the content of the file: caches of what is made from it must compare it."""
        return str(self._value("etag", row).as_py())

    def content(self, row: int) -> int:
        """A digest of the beginning of the file; 0 if the scan did not open it."""
        return int(self._value("content", row).as_py())

    def captions(self, row: int) -> tuple[str, ...]:
        return tuple(self._value("captions", row).as_py())

    def place(self, row: int) -> str:
        """Where the source has the bytes, as it wrote it; "" for the file `key(row)` of the storage."""
        return str(self._value("place", row).as_py())

    def value(self, field: str, row: int) -> object:
        """What one of the `Column.fields` has in this row."""
        return self._value(field, row).as_py()

    def size(self, row: int) -> tuple[int, int]:
        """Width and height in pixels."""
        return int(self._value("width", row).as_py()), int(self._value("height", row).as_py())

    def batches(self, *columns: str) -> Iterator[IndexBatch]:
        """All rows in order, at most 2**20 at a time."""
        for number, start in enumerate(self._starts[:-1]):
            yield IndexBatch(start=start, columns={name: self._column(name, number) for name in columns})

    def keys(self) -> Iterator[str]:
        """The keys of all rows, in order."""
        for batch in self.batches("key"):
            yield from batch.columns["key"].to_pylist()

    @property
    def table(self) -> pa.Table:
        """All columns, sorted by key. Mapped; see the module's warning."""
        return pa.Table.from_batches([self._file.batch(number) for number in range(len(self._file))])

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The unusable samples, each with the reason. Reads the whole index, if there are any."""
        return tuple(self.unusable_rows())

    def unusable_rows(self) -> Iterator[Quarantined]:
        """Yields the unusable samples, each with the reason."""
        for batch in self.batches("key", "width", "problem") if self.unusable else ():
            for row in np.flatnonzero(batch.columns["width"].to_numpy() == 0).tolist():
                key, reason = (str(batch.columns[name][row].as_py()) for name in ("key", "problem"))
                yield Quarantined(dataset=self.dataset, key=key, reason=reason)

    def _value(self, column: str, row: int) -> pa.Scalar:
        if not 0 <= row < len(self):
            raise IndexError(f"no row {row} in an index of {len(self)}")
        number = bisect_right(self._starts, row) - 1
        return self._column(column, number)[row - self._starts[number]]

    def _column(self, name: str, number: int) -> pa.Array:
        if name == "caption_hash":  # a column of earlier versions, which digests in their checkpoints contain
            lists = self._file.batch(number).column("captions").to_pylist()
            return pa.array([as_signed(derive_seed(*texts)) if texts else 0 for texts in lists], pa.int64())
        array = self._columns.get((name, number))
        if array is None:
            array = self._columns[name, number] = self._file.batch(number).column(name)
        return array


def load_index(spec: DatasetSpec, cache: Path) -> DatasetIndex:
    """Returns the index that another process built. Raises UserError if it is missing, or of another configuration."""
    fix = "build it first: smalti dataset scan, with the options of the run"
    try:
        file = IndexFile(cache)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"the index {cache} of dataset {spec.id!r} cannot be read: {error}", fix=fix) from error
    if file.recipe != recipe_of(spec) or file.summary is None:
        raise UserError(f"the index {cache} was built for another configuration of dataset {spec.id!r}", fix=fix)
    return DatasetIndex(spec.id, file, file.summary)


def read_table(path: Path) -> pa.Table:
    """Returns an index of any version as a table, mapped into memory. Raises OSError or pa.ArrowInvalid."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()
