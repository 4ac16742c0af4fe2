"""Reads tables with one JSON object per line: by columns, block by block, and line by line where a block has faulty lines."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from smalti import ConfigError, Problem
from smalti.data import JsonTable
from smalti.system import load_json
from smalti_data.tables.columns import Projection, TableColumns

LINES = pa.schema(
    [
        ("name", pa.string()),
        ("captions", pa.list_(pa.string())),  # null: the line has none
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("line", pa.int64()),
    ]
)
_MAX_PROBLEMS = 10  # at most this many lines are reported
_PLAIN_NAME = r"^[^./][^/]*(/[^./][^/]*)*$"  # `normpath` leaves these as they are


class Lines:
    """The lines of a table, parsed. `location` is its path or address, for messages.

    `weighted`: of several caption columns, each has its place in the captions of a line, "" where it has none.
    """

    def __init__(self, table: JsonTable, location: str, *, weighted: bool = False) -> None:
        self._table = table
        self._caption_names = _caption_names(table)
        self._several = _several(table, location, weighted)
        self._location = location
        self._problems: list[Problem] = []
        self._texts: list[pa.DataType] = [pa.string(), pa.list_(pa.string())]

    def batches(self, blocks: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
        """Yields batches of `LINES` from blocks of whole lines. Raises ConfigError with the first faulty lines."""
        number = 1
        for block in blocks:
            text = block.removeprefix(b"\xef\xbb\xbf") if number == 1 else block
            parsed = self._columns(text, number)
            if parsed is None:
                parsed = self._careful(text, number)
            if self._problems:
                if len(self._problems) >= _MAX_PROBLEMS:
                    break
            elif len(parsed):
                yield parsed
            number += block.count(b"\n")
        if self._problems:
            raise ConfigError(self._problems[:_MAX_PROBLEMS])

    def twice(self, names: pa.Array, lines: pa.Array) -> ConfigError:
        """The error for these names, which occurred in other lines before."""
        found = sorted(zip(lines.to_pylist(), names.to_pylist(), strict=True))[:_MAX_PROBLEMS]
        return ConfigError([self._problem(f"{name!r} occurs twice", line) for line, name in found])

    def _columns(self, text: bytes, first: int) -> pa.RecordBatch | None:
        """The lines of a block; None if some of them need a closer look."""
        table = self._table
        names = (table.filename_column, table.width_column, table.height_column, *self._caption_names)
        rows = text.count(b"\n") + (not text.endswith(b"\n"))
        if len(set(names)) < len(names) or not text:
            return None
        for caption in self._texts:
            kinds = (pa.string(), pa.float64(), pa.float64(), *(caption for _ in self._caption_names))
            schema = pa.schema(list(zip(names, kinds, strict=True)))
            options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
            reading = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
            try:
                found = pa.json.read_json(io.BytesIO(text), reading, options).combine_chunks()
                found.validate(full=True)
            except pa.ArrowInvalid:
                continue
            if found.num_rows != rows:  # blank lines, or an object over several
                return None
            self._texts.sort(key=lambda kind, caption=caption: kind != caption)  # type: ignore[misc]
            name, width, height, *texts = (found.column(each).combine_chunks() for each in names)
            if name.null_count or pc.any(pc.equal(name, "")).as_py() or not (_are_pixels(width) and _are_pixels(height)):
                return None
            lines = pa.array(np.arange(first, first + rows))
            sizes = (each.cast(pa.int32()) for each in (width, height))
            return pa.RecordBatch.from_arrays([_normalised(name), self._captions(texts), *sizes, lines], schema=LINES)
        return None

    def _careful(self, text: bytes, first: int) -> pa.RecordBatch:
        """The lines of a block, one by one; notes the problems."""
        rows = []
        for number, line in enumerate(text.split(b"\n"), start=first):
            if not line.strip():
                continue
            try:
                rows.append({**_parsed(load_json(line), self._table, self._caption_names), "line": number})
            except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
                self._problems.append(self._problem(str(error), number, names_columns=isinstance(error, _MissingColumnError)))
        texts = [
            pa.array([row[name] for row in rows], LINES.field("captions").type) for name in range(len(self._caption_names))
        ]
        columns = {
            each.name: pa.array([row[each.name] for row in rows], each.type) for each in LINES if each.name != "captions"
        }
        columns["captions"] = self._captions(texts)
        return pa.RecordBatch.from_arrays([columns[name] for name in LINES.names], schema=LINES)

    def _captions(self, texts: list[pa.Array]) -> pa.Array:
        """The captions of each line, from what its caption columns have."""
        if self._several is None:
            return _stripped(texts[0])
        return self._several.captions(pa.RecordBatch.from_arrays(texts, names=list(self._caption_names)))

    def _problem(self, message: str, line: int, *, names_columns: bool = False) -> Problem:
        fix = 'name the columns: "json": {"filename_column": ..., "caption_column": ...}' if names_columns else "fix the line"
        return Problem(message=message, where=f"{self._location}, line {line}", fix=fix)


def blocks_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that end with a line."""
    rest = b""
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        yield rest


def _caption_names(table: JsonTable) -> tuple[str, ...]:
    found = (*table.caption_columns, table.fallback_caption_column)
    return tuple(dict.fromkeys(name for name in found if name is not None))


def _several(table: JsonTable, location: str, weighted: bool) -> Projection | None:
    """What joins several caption columns, as in other tables; None for one column alone."""
    if isinstance(table.caption_column, str) and table.fallback_caption_column is None:
        return None
    columns = TableColumns(caption_column=table.caption_column, fallback_caption_column=table.fallback_caption_column)
    schema = pa.schema([(name, LINES.field("captions").type) for name in _caption_names(table)])
    return Projection(columns, schema, location, captions=True, weighted=weighted, only_captions=True)


class _MissingColumnError(ValueError):
    """A line of the table has no file name in the column where it is expected."""


def _are_pixels(values: pa.Array) -> bool:
    numbers = values.drop_null().to_numpy()
    return bool(((numbers >= 1) & (numbers == np.floor(numbers)) & (numbers < 2**31)).all())


def _normalised(names: pa.Array) -> pa.Array:
    if pc.all(pc.match_substring_regex(names, _PLAIN_NAME)).as_py():
        return names
    return pa.array([posixpath.normpath(name) for name in names.to_pylist()], pa.string())


def _stripped(captions: pa.Array) -> pa.Array:
    """Captions as lists, without spaces around texts and without empty texts; null stays null."""
    is_list = pa.types.is_list(captions.type)
    texts = pc.utf8_trim_whitespace(captions.flatten() if is_list else captions.drop_null())
    lengths = pc.fill_null(pc.list_value_length(captions), 0).to_numpy() if is_list else captions.is_valid().to_numpy(False)
    kept = pc.fill_null(pc.not_equal(texts, ""), False).to_numpy(zero_copy_only=False)
    counts = np.bincount(np.repeat(np.arange(len(captions)), lengths)[kept], minlength=len(captions))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    missing = captions.is_null() if captions.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), texts.filter(pa.array(kept)), mask=missing)


def _parsed(row: object, table: JsonTable, caption_names: tuple[str, ...]) -> dict[str | int, object]:
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    name = row.get(table.filename_column)
    if not isinstance(name, str) or not name:
        raise _MissingColumnError(f"no file name under {table.filename_column!r}; the columns are {', '.join(map(str, row))}")
    width, height = (_pixels(row, column) for column in (table.width_column, table.height_column))
    captions: dict[str | int, object] = {place: _captions(row.get(column)) for place, column in enumerate(caption_names)}
    return captions | {"name": posixpath.normpath(name), "width": width, "height": height}


def _pixels(row: Mapping[str, object], column: str) -> int | None:
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ValueError(f"{column!r} must be a whole number of pixels, not {value!r}")
    return int(value)


def _captions(value: object) -> list[str] | None:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a caption must be a text or a list of texts, not {value!r}")
    return [text.strip() for text in cast("list[str]", texts) if text.strip()]
