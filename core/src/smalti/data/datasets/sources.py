"""Metadata sources: names, sizes and captions of a dataset's samples, from the folder itself or from a table.

A source lists samples and opens no image. The index fills in what it does not know: a missing size from the image's header,
captions by the dataset's `caption_strategy`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

DESCRIPTIONS = frozenset((".json", ".jsonl", ".csv", ".tsv", ".parquet", ".md", ".toml", ".yaml", ".yml", ".ini", ".db"))
"""Extensions of files beside images that are not samples; they are not reported as skipped."""
CAPTION_EXTENSIONS = (".txt", ".caption")
"""Extensions of text files that are not reported as skipped where captions come from others."""
_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A sample as its source lists it. None means unknown to the source.

    `size` is that of the file in bytes. `caption_etag` is the etag of the text file beside the image, "" without one, so that
    a changed caption is detected. `place` says where the bytes are if they are not a file of the storage, in words of the
    source, which then has `read`. A sample with a `problem` is quarantined without being opened. `content` is a digest
    of the image, never 0: where sizes are listed too, it distinguishes an image from another one of the same size.
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
    content: int | None = None


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
        pa.field("content", pa.int64()),  # null: unknown to the source
    ]
)
"""The fields of `Listed` as columns."""


@dataclass(frozen=True, kw_only=True)
class ListedState:
    """What a source listed, in short: a digest of everything that determines the samples, and what is for the user."""

    digest: str
    notices: tuple[str, ...] = ()
    skipped_files: Mapping[str, int] = field(default_factory=dict)
    bytes_per_shuffled_image: int = 0


class MetadataSource:
    """What a metadata backend provides. Made by its factory from a `DatasetSpec` and a `Storage`.

    A source writes `list`, or `list_columns`, which costs a fraction of the CPU time. Everything else has a default.
    """

    skipped_files: Mapping[str, int] = {}
    """How many files that may have been meant as samples the last list skipped, by extension in lower case ("" for none)."""
    notices: tuple[str, ...] = ()
    """Messages for the user about the last list."""
    listed_state: ListedState | None = None
    """That of the last complete list; None if files changed during it, or if `is_unchanged` cannot tell."""

    def __init_subclass__(cls) -> None:
        if cls.list is MetadataSource.list and cls.list_columns is MetadataSource.list_columns:
            raise TypeError(f"{cls.__name__} has neither list nor list_columns")

    def list(self) -> Iterator[Listed]:
        """All samples, sorted by key, each key once. Called once per scan. Raises UserError for a table that cannot be read."""
        for batch in self.list_columns():
            for row in batch.to_pylist():
                yield Listed(**row | {"captions": None if row["captions"] is None else tuple(row["captions"])})

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        """The same samples as `list`, sorted by key, with the schema `LISTED`, at most 2**20 rows at a time."""
        listed = self.list()
        while some := [*islice(listed, _ROWS)]:
            columns = [pa.array([getattr(one, field.name) for one in some], field.type) for field in LISTED]
            yield pa.RecordBatch.from_arrays(columns, schema=LISTED)

    def read(self, place: str) -> bytes:
        """All bytes of an image that is part of another file. Called from several threads at once.

        Raises a StorageError, or BadSampleError for a damaged part.
        """
        raise NotImplementedError(f"{type(self).__name__} lists {place!r}, but does not read places")

    def read_range(self, place: str, start: int, length: int) -> bytes:
        """Up to `length` bytes of such an image from offset `start`; fewer at its end."""
        return self.read(place)[start : start + length]

    @property
    def bytes_per_shuffled_image(self) -> int:
        """Bytes that `read` costs for one image in a shuffled order, as the last list found; 0 if that is not much more."""
        return 0

    def is_unchanged(self, before: ListedState) -> bool:
        """Whether a list would find what it found then. If so, its notices and skipped files become those of this source."""
        return False

    def check_table(self) -> None:
        """Raises UserError or ConfigError for a table that is missing, or lacks a column. Reads its beginning at most."""

    def use_folder(self, folder: Path) -> None:
        """Called before a list with a folder of the run for this dataset, which need not exist. Not called if there is none."""


def listed_columns(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Some of the columns of `LISTED`, completed: captions and sizes are unknown, texts are empty."""
    empty = pa.array([""]).take(pa.array(np.zeros(len(columns), dtype=np.int64)))
    names = columns.schema.names
    others = {field.name: pa.nulls(len(columns), field.type) if field.nullable else empty for field in LISTED}
    arrays = [columns.column(name) if name in names else others[name] for name in LISTED.names]
    return pa.RecordBatch.from_arrays(arrays, schema=LISTED)


def describe_skipped(skipped_files: Mapping[str, int]) -> str:
    """Returns the counts as text, largest first: "12 .heic, 1 without an extension"."""
    ordered = sorted(skipped_files.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {extension or 'without an extension'}" for extension, count in ordered)


def caption_key(key: str, extension: str) -> str:
    """The key of the text file that belongs to an image."""
    return f"{posixpath.splitext(key)[0]}{extension}"
