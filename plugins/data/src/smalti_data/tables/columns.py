"""Which columns of a table are read, and what they become: one name, the captions and the size of each row."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import ValidationError

from smalti import ConfigError, UserError
from smalti.data import wrong_values
from smalti_data.keys import TableKeys

ROWS = pa.schema([("name", pa.string()), ("captions", pa.list_(pa.string())), ("width", pa.int32()), ("height", pa.int32())])
"""What each batch of a table becomes. `captions` is empty where the row has none; sizes are null where they are unknown."""

_UNREAD = (
    "num_frames_column", "fps_column", "bbox_column", "audio_sample_rate_column", "audio_num_samples_column",
    "audio_duration_column", "audio_channels_column", "lyrics_column",
)  # fmt: skip
"""Keys of SimpleTuner about videos, sounds and boxes, which image datasets do not read."""
_PLAIN_NAME = r"^[^./][^/]*(/[^./][^/]*)*$"


class TableColumns(TableKeys):
    """The block of a metadata table, checked."""

    @classmethod
    def of(cls, block: Mapping[str, object], where: str) -> TableColumns:
        """Raises ConfigError with every wrong key."""
        read = {key: value for key, value in block.items() if key not in _UNREAD and value is not None}
        try:
            return cls.model_validate(read)
        except ValidationError as error:
            raise ConfigError(list(wrong_values(error, read, where))) from error

    @property
    def caption_columns(self) -> tuple[str, ...]:
        return (self.caption_column,) if isinstance(self.caption_column, str) else tuple(self.caption_column)

    @property
    def weighted(self) -> bool:
        """Whether each row has as many captions as there are columns, "" where a column has none."""
        return isinstance(self.caption_column, dict)


class Projection:
    """The columns of one table. Raises UserError for a column that is missing or of a wrong type; the message lists them.

    `captions`: whether captions come from the table at all; `only_captions`: nothing else does. `weighted`: whether each row
    has as many captions as there are columns, "" where a column has none. `root`: a folder that names may begin with.
    """

    def __init__(
        self,
        columns: TableColumns,
        schema: pa.Schema,
        location: str,
        *,
        captions: bool,
        weighted: bool = False,
        only_captions: bool = False,
        root: str = "",
    ) -> None:
        self._columns = columns
        self._schema = schema
        self._location = location
        self._weighted = weighted or columns.weighted
        self._root = root.rstrip("/") + "/" if root else ""
        self._captions = columns.caption_columns if captions else ()
        self._fallback = columns.fallback_caption_column if captions else None
        self._filename = None if only_captions else columns.filename_column
        sizes = tuple(
            given or (default if default in schema.names else None)
            for given, default in ((columns.width_column, "width"), (columns.height_column, "height"))
        )
        self._sizes = (None, None) if None in sizes or only_captions else sizes
        named = {
            "filename_column": (self._filename,),
            "caption_column": self._captions,
            "fallback_caption_column": (self._fallback,),
            "width_column": self._sizes[:1],
            "height_column": self._sizes[1:],
        }
        for key, names in named.items():
            for name in names:
                if name is not None and leaf(schema, name) is None:
                    fix = f"set {key} to one of its columns: {', '.join(leaves(schema))}"
                    raise self._error(f"has no column {name!r}", fix)

    @property
    def names(self) -> list[str]:
        """The columns to read, with dots."""
        found = (self._filename, *self._captions, self._fallback, *self._sizes)
        return list(dict.fromkeys(name for name in found if name is not None))

    def rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Returns the rows of a batch, in order, with the schema `ROWS`, and how many were left out, for they name no file."""
        names = self._names(column(batch, self._columns.filename_column))
        captions = self.captions(batch)
        width, height = (self._pixels(batch, name) for name in self._sizes)
        found = pa.RecordBatch.from_arrays([names, captions, width, height], schema=ROWS)
        missing = pc.or_kleene(pc.is_null(names), pc.equal(names, ""))
        count = int(pc.sum(missing).as_py() or 0)
        return (found.filter(pc.invert(missing)) if count else found), count

    def _names(self, values: pa.Array) -> pa.Array:
        if not (_is_text(values.type) or pa.types.is_integer(values.type)):
            raise self._wrong_type("filename_column", self._columns.filename_column, values.type, "texts")
        names = values.cast(pa.string())
        plain = pc.match_substring_regex(names, _PLAIN_NAME)
        if pc.all(plain).as_py() is not False:
            return names
        return pa.array([None if name is None else self._relative(name) for name in names.to_pylist()], pa.string())

    def _relative(self, name: str) -> str:
        name = name.removeprefix(self._root) if self._root else name
        return posixpath.normpath(name) if name else ""

    def captions(self, batch: pa.RecordBatch) -> pa.Array:
        """The captions of each row, as a list."""
        if not self._captions:
            return pa.nulls(batch.num_rows, pa.list_(pa.string()))
        rows, texts = zip(*(self._text_column(batch, name) for name in self._captions), strict=True)
        if self._fallback is not None:
            none = np.ones(batch.num_rows, dtype=bool)
            for each in rows:
                none[each] = False
            found, more = self._text_column(batch, self._fallback)
            wanted = none[found]
            at, added = found[wanted], more.filter(pa.array(wanted))
            if not self._weighted:
                return _lists((*rows, at), (*texts, added), batch.num_rows)
            rows, texts = (np.concatenate((rows[0], at)), *rows[1:]), (pa.concat_arrays([texts[0], added]), *texts[1:])
        if self._weighted:
            return _padded(rows, texts, batch.num_rows)
        return _lists(rows, texts, batch.num_rows)

    def _text_column(self, batch: pa.RecordBatch, name: str) -> tuple[NDArray[np.int64], pa.Array]:
        """Returns the texts of a column that are not empty, and the row of each, ascending."""
        values = column(batch, name)
        kind = values.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            rows, values = pc.list_parent_indices(values).to_numpy(zero_copy_only=False), pc.list_flatten(values)
        else:
            rows = np.arange(len(values))
        if pa.types.is_null(values.type):
            values = values.cast(pa.string())
        if not _is_text(values.type):
            raise self._wrong_type("caption_column", name, kind, "texts, or lists of texts")
        texts = values.cast(pa.string())
        ascii = pc.all(pc.string_is_ascii(texts)).as_py() is not False  # then a third of the time
        texts = pc.ascii_trim_whitespace(texts) if ascii else pc.utf8_trim_whitespace(texts)
        there = pc.fill_null(pc.not_equal(texts, ""), fill_value=False)
        return rows[there.to_numpy(zero_copy_only=False)].astype(np.int64), texts.filter(there)

    def _pixels(self, batch: pa.RecordBatch, name: str | None) -> pa.Array:
        if name is None:
            return pa.nulls(batch.num_rows, pa.int32())
        values = column(batch, name)
        if pa.types.is_null(values.type):
            return values.cast(pa.int32())
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise self._wrong_type("width_column or height_column", name, values.type, "whole numbers of pixels")
        try:
            pixels = pc.if_else(pc.is_finite(values), values, None) if pa.types.is_floating(values.type) else values
            pixels = pixels.cast(pa.int32())
        except pa.ArrowInvalid as error:
            fix = "correct the table, or set width_column and height_column to other columns"
            raise self._error(f"has sizes in {name!r} that are no whole numbers of pixels: {error}", fix) from error
        return pc.if_else(pc.greater(pixels, 0), pixels, None)

    def _wrong_type(self, key: str, name: str, kind: pa.DataType, wanted: str) -> UserError:
        return self._error(
            f"has {kind} in the column {name!r}, where {wanted} are expected",
            f"set {key} to another of its columns: {', '.join(leaves(self._schema))}",
        )

    def _error(self, message: str, fix: str) -> UserError:
        return UserError(f"the table {self._location} {message}", fix=fix)


def leaves(schema: pa.Schema) -> list[str]:
    """The names of all columns; fields of structs after a dot."""
    found, left = [], [(field.name, field.type) for field in schema]
    while left:
        name, kind = left.pop(0)
        if pa.types.is_struct(kind):
            left = [(f"{name}.{field.name}", field.type) for field in kind] + left
        else:
            found.append(name)
    return found


def leaf(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column; a dot reaches into structs. None if there is no such column."""
    if name in schema.names:
        return schema.field(name).type
    first, *parts = name.split(".")
    kind = schema.field(first).type if first in schema.names else None
    for part in parts:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind if parts else None


def column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of a batch; a dot reaches into structs. Dictionaries are decoded."""
    values = (
        batch.column(name)
        if name in batch.schema.names
        else pc.struct_field(batch.column(name.split(".")[0]), name.split(".")[1:])
    )
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def local_table(path: str) -> Path:
    """The table as a path on this machine."""
    return Path(path).expanduser().absolute()


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _lists(rows: Sequence[NDArray[np.int64]], texts: Sequence[pa.Array], count: int) -> pa.Array:
    """Texts as a list per row: those of the first column before those of the second."""
    if len(rows) == 1:
        parents, values = rows[0], texts[0]
    else:
        parents, values = np.concatenate(rows), pa.concat_arrays(texts)
        order = np.argsort(parents, kind="stable")
        parents, values = parents[order], values.take(pa.array(order))
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(parents, minlength=count), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _padded(rows: Sequence[NDArray[np.int64]], texts: Sequence[pa.Array], count: int) -> pa.Array:
    """One text per column in each row, the first one of the column, or "". A row without any text has an empty list."""
    columns, some = [], np.zeros(count, dtype=bool)
    for parents, values in zip(rows, texts, strict=True):
        first, at = np.unique(parents, return_index=True)
        index = np.full(count, -1)
        index[first] = at
        some[first] = True
        columns.append(pc.fill_null(values.take(pa.array(index, mask=index < 0)), ""))
    kept = np.flatnonzero(some)
    return _lists([kept] * len(columns), [each.take(pa.array(kept)) for each in columns], count)
