"""Metadata sources: names, sizes and captions of a dataset's samples, from the folder itself or from a table.

A source lists samples and opens no image. The index fills in what it does not know: a missing size from the image's header,
captions by the dataset's `caption_strategy`.
"""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from smalti.data.datasets.spec import DatasetSpec, JsonTable
from smalti.data.scan.image_headers import EXTENSIONS
from smalti.data.storage.protocol import MissingFileError, Storage, StoredFile
from smalti.errors import ConfigError, Problem, UserError

DESCRIPTIONS = frozenset((".json", ".jsonl", ".csv", ".tsv", ".parquet", ".md", ".toml", ".yaml", ".yml", ".ini", ".db"))
"""Extensions of files beside images that are not samples; they are not reported as skipped."""
CAPTION_EXTENSIONS = (".txt", ".caption")
"""Extensions of text files that are not reported as skipped where captions come from others."""
_DEFAULT_TABLE = "metadata.jsonl"
_MAX_PROBLEMS = 10  # at most this many lines are reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A sample as its source lists it. None means unknown to the source.

    `size` is that of the file in bytes. `caption_etag` is the etag of the text file beside the image, "" without one, so that
    a changed caption is detected. `place` says where the bytes are if they are not a file of the storage, in words of the
    source, which then `ReadsPlaces`. A sample with a `problem` is quarantined without being opened.
    """

    key: str
    size: int
    etag: str
    captions: tuple[str, ...] | None = None
    caption_etag: str = ""
    width: int | None = None
    height: int | None = None
    place: str = ""
    problem: str = ""


LISTED = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("captions", pa.list_(pa.string())),  # null: unknown to the source
        pa.field("caption_etag", pa.string(), nullable=False),
        pa.field("width", pa.int32()),  # null: unknown to the source
        pa.field("height", pa.int32()),
        pa.field("place", pa.string(), nullable=False),
        pa.field("problem", pa.string(), nullable=False),
    ]
)
"""The fields of `Listed` as columns."""


@runtime_checkable
class ListsColumns(Protocol):
    """What a source has in addition to `list` if it can list samples as columns, which costs a fraction of the CPU time."""

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        """The same samples as `list`, sorted by key, with the schema `LISTED`, at most 2**20 rows at a time."""
        ...


@runtime_checkable
class ReadsPlaces(Protocol):
    """What a source has in addition to `list` if its samples are parts of other files: it reads by their `place`.

    Called from several threads at once. Raises a StorageError, or BadSampleError for a damaged part.
    """

    def read(self, place: str) -> bytes:
        """All bytes of an image."""
        ...

    def read_range(self, place: str, start: int, length: int) -> bytes:
        """Up to `length` bytes of an image from offset `start`; fewer at its end."""
        ...


@runtime_checkable
class ReportsSkipped(Protocol):
    """What a source has in addition to `list` if it skips files that may have been meant as samples."""

    @property
    def skipped_files(self) -> Mapping[str, int]:
        """How many files the last `list` skipped, by extension in lower case ("" for none)."""
        ...


@runtime_checkable
class ReportsNotices(Protocol):
    """What a source has in addition to `list` if it has messages for the user about what it listed."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages about the last `list`."""
        ...


@runtime_checkable
class UsesFolder(Protocol):
    """What a source has in addition to `list` if it keeps files between scans, or writes lists for the user."""

    def use_folder(self, folder: Path) -> None:
        """Called before `list` with a folder of the run for this dataset, which need not exist. Not called if there is none."""
        ...


class MetadataSource(Protocol):
    """What a metadata backend provides. Made by its factory from a `DatasetSpec` and a `Storage`."""

    def list(self) -> Iterator[Listed]:
        """All samples, sorted by key, each key once. Called once per scan. Raises UserError for a table that cannot be read."""
        ...


def listed_rows(source: MetadataSource) -> Iterator[Listed]:
    """Everything that a source lists, one at a time, also where it lists columns."""
    if not isinstance(source, ListsColumns):
        yield from source.list()
        return
    for batch in source.list_columns():
        for row in batch.to_pylist():
            yield Listed(**row | {"captions": None if row["captions"] is None else tuple(row["captions"])})


def listed_columns(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Some of the columns of `LISTED`, completed: captions and sizes are unknown, texts are empty."""
    empty = pa.array([""]).take(pa.array(np.zeros(len(columns), dtype=np.int64)))
    names = columns.schema.names
    others = {field.name: pa.nulls(len(columns), field.type) if field.nullable else empty for field in LISTED}
    arrays = [columns.column(name) if name in names else others[name] for name in LISTED.names]
    return pa.RecordBatch.from_arrays(arrays, schema=LISTED)


class Discovery:
    """Every image below the dataset's root, by file extension. Hidden files and folders (".name") are skipped."""

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self.skipped_files: Mapping[str, int] = {}

    def list(self) -> Iterator[Listed]:
        return listed_rows(self)

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        from smalti.data.sources.image_files import (
            ImageFiles,  # imported here: it imports pyarrow.compute, which few processes need
        )

        files = ImageFiles(self._storage, self._spec.caption_extension)
        for images in files.batches():
            yield listed_columns(images)
        self.skipped_files = files.skipped


class JsonLines:
    """A table with one JSON object per line; its columns are named in the dataset's `json` block.

    The storage is listed as well, for file sizes and etags. A line whose file is missing is quarantined; an image without a
    line is not part of the dataset.
    """

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._table = spec.json_table
        self._storage = storage

    def list(self) -> Iterator[Listed]:
        lines = _parse(self._read(), self._table, self.location)
        files = list_files(self._storage, self._spec.caption_extension)
        for key in sorted(lines):
            file = files.images.get(key)
            if file is None:
                yield Listed(key=key, size=0, etag="", problem=f"listed in {self.location}, but the image is missing")
                continue
            row = lines[key]
            yield Listed(
                key=key,
                size=file.size,
                etag=file.etag,
                captions=row.captions,
                caption_etag=files.texts.get(caption_key(key, self._spec.caption_extension), ""),
                width=row.width,
                height=row.height,
            )

    @property
    def location(self) -> str:
        return str(self._table.path) if self._table.path else f"{self._storage.location}/{_DEFAULT_TABLE}"

    def _read(self) -> bytes:
        try:
            return self._table.path.read_bytes() if self._table.path else self._storage.read(_DEFAULT_TABLE)
        except (OSError, MissingFileError) as error:
            fix = 'create the table, or set its path: "json": {"path": ...}'
            raise UserError(f"the metadata table {self.location} cannot be read", fix=fix) from error


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a storage: images by key, in order of their keys, and the etags of text files by key.

    `skipped_files` counts all others, by extension in lower case. Hidden files, and files that describe data (`DESCRIPTIONS`),
    are not counted.
    """

    images: Mapping[str, StoredFile]
    texts: Mapping[str, str]
    skipped_files: Mapping[str, int]


def list_files(storage: Storage, caption_extension: str = ".txt") -> Files:
    """List a storage and sort its files by kind."""
    images: dict[str, StoredFile] = {}
    texts: dict[str, str] = {}
    skipped_files: Counter[str] = Counter()
    for file in storage.list():
        extension = posixpath.splitext(file.key)[1].lower()
        if file.key.startswith(".") or "/." in file.key:
            continue
        if extension in EXTENSIONS:
            images[file.key] = file
        elif extension == caption_extension:
            texts[file.key] = file.etag
        elif extension not in DESCRIPTIONS and extension not in CAPTION_EXTENSIONS:
            skipped_files[extension] += 1
    return Files(images=images, texts=texts, skipped_files=skipped_files)


def describe_skipped(skipped_files: Mapping[str, int]) -> str:
    """Returns the counts as text, largest first: "12 .heic, 1 without an extension"."""
    ordered = sorted(skipped_files.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {extension or 'without an extension'}" for extension, count in ordered)


def caption_key(key: str, extension: str) -> str:
    """The key of the text file that belongs to an image."""
    return f"{posixpath.splitext(key)[0]}{extension}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    captions: tuple[str, ...] | None
    width: int | None
    height: int | None


class _MissingColumnError(ValueError):
    """A line of the table has no file name in the column where it is expected."""


def _parse(data: bytes, table: JsonTable, location: str) -> dict[str, _Line]:
    """Returns the lines of a table by key. Raises ConfigError with the first lines that cannot be parsed."""
    lines: dict[str, _Line] = {}
    problems: list[Problem] = []
    for number, text in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            key, line = _parse_line(json.loads(text), table)
            if key in lines:
                raise ValueError(f"{key!r} occurs twice")
            lines[key] = line
        except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
            names_columns = isinstance(error, _MissingColumnError)
            fix = (
                'name the columns: "json": {"filename_column": ..., "caption_column": ...}' if names_columns else "fix the line"
            )
            problems.append(Problem(message=str(error), where=f"{location}, line {number}", fix=fix))
            if len(problems) == _MAX_PROBLEMS:
                break
    if problems:
        raise ConfigError(problems)
    return lines


def _parse_line(row: object, table: JsonTable) -> tuple[str, _Line]:
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    name = row.get(table.filename_column)
    if not isinstance(name, str) or not name:
        raise _MissingColumnError(f"no file name under {table.filename_column!r}; the columns are {', '.join(map(str, row))}")
    width, height = (_pixels(row, column) for column in (table.width_column, table.height_column))
    return posixpath.normpath(name), _Line(captions=_captions(row.get(table.caption_column)), width=width, height=height)


def _pixels(row: Mapping[str, object], column: str) -> int | None:
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ValueError(f"{column!r} must be a whole number of pixels, not {value!r}")
    return int(value)


def _captions(value: object) -> tuple[str, ...] | None:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a caption must be a text or a list of texts, not {value!r}")
    return tuple(text.strip() for text in texts if text.strip())
