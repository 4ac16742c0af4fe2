"""The column `loss_weight`: the factor of the loss of each image, the same for a dataset or from a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from smalti import UserError
from smalti.data import Catalog, Column, ColumnSample, DatasetSpec, Framing
from smalti_objectives.columns.keys import WeightKeys, WeightTable

_FIELD = pa.field("loss_weight", pa.float64())
"""In the index, of a dataset with a table: not a number where the table has no weight."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def open_weight(spec: DatasetSpec, keys: WeightKeys, catalog: Catalog, specs: Sequence[DatasetSpec]) -> LossWeight:
    """The column of a dataset."""
    return LossWeight(spec, keys)


class LossWeight(Column):
    """The weights of one dataset: a number without dimensions for each image, fp32."""

    def __init__(self, spec: DatasetSpec, keys: WeightKeys) -> None:
        self.fields = (_FIELD,) if keys.loss_weight_table else ()
        self._spec = spec
        self._keys = keys
        self._table: tuple[pa.Array, pa.Array] | None = None

    def listed(self, samples: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        from smalti.data import stems

        assert self._keys.loss_weight_table is not None, "it has a field"
        self._table = self._table or _weights(self._keys.loss_weight_table, f"dataset {self._spec.id!r}")
        (names, weights), keys = self._table, samples.column("key")
        without_extension = pc.utf8_slice_codeunits(stems(keys), 0, -1)
        found = pc.coalesce(pc.index_in(keys, value_set=names), pc.index_in(without_extension, value_set=names))
        return samples.append_column(_FIELD, pc.fill_null(weights.take(found), float("nan")))

    def check(self, fields: Iterable[Mapping[str, pa.Array]]) -> Sequence[str]:
        table = self._keys.loss_weight_table
        assert table is not None, "it has a field"
        weights = np.concatenate([each["loss_weight"].to_numpy() for each in fields])
        total, missing = len(weights), int(np.isnan(weights).sum())
        if missing == total:
            message = f"dataset {self._spec.id!r}: {table.path} has a weight of none of its {missing} images"
            raise UserError(message, fix="set filename_column to the column of paths relative to the dataset's folder")
        start = f"dataset {self._spec.id!r}: {missing} of {total} images have no weight in {table.path}"
        return (f"{start}; theirs is loss_weight: {self._keys.loss_weight:g}",) if missing else ()

    def read(self, sample: ColumnSample, framing: Framing) -> Tensor:
        weight = self._keys.loss_weight
        if self.fields and not np.isnan(found := float(str(sample.value("loss_weight")))):
            weight = found
        return torch.tensor(weight, dtype=torch.float32)

    def neutral(self, framing: Framing) -> Tensor:
        return torch.tensor(1.0)


def _weights(table: WeightTable, where: str) -> tuple[pa.Array, pa.Array]:
    """Names and weights of all rows that have both. Raises UserError for a table that cannot be used."""
    import pyarrow.compute as pc

    names = [table.filename_column, table.weight_column]
    try:
        found = _read(table.path, names)
        keys, weights = (found.column(name).combine_chunks() for name in names)
        keys, weights = keys.cast(pa.string()), weights.cast(pa.float64())
    except (OSError, KeyError, pa.ArrowException) as error:
        message = f"{where}: weights cannot be read from {table.path}: {str(error).partition(chr(10))[0]}"
        raise UserError(message, fix=f"give a table with the columns {' and '.join(names)}, or name others") from error
    rows = pc.and_(keys.is_valid(), weights.is_valid())
    keys, weights = keys.filter(rows), weights.filter(rows)
    wrong = pc.invert(pc.and_(pc.is_finite(weights), pc.greater_equal(weights, 0)))
    if pc.any(wrong).as_py():
        first = f"{keys.filter(wrong)[0]} has {weights.filter(wrong)[0]}"
        raise UserError(f"{where}: {table.path} has weights that are none: {first}", fix="give numbers from 0 on")
    return keys, weights


def _read(path: Path, names: list[str]) -> pa.Table:
    """These columns of a table, whose format its name says. Raises KeyError for a column that is not there."""
    match path.suffix.lower():
        case ".parquet":
            from pyarrow import parquet

            table = parquet.read_table(path, columns=names)
        case ".csv" | ".tsv" as extension:
            from pyarrow import csv

            kept = csv.ConvertOptions(include_columns=names, column_types={names[0]: pa.string()})
            table = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=_DELIMITERS[extension]), convert_options=kept)
        case _:
            from pyarrow import json

            table = json.read_json(path)
    return table.select(names)
