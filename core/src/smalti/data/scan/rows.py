"""The rows of an index from what a source lists: by columns, and one by one only where a file has to be opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from smalti.data.datasets.captions import (
    NO_CAPTION,
    captions_are_listed,
    depends_on_text_file,
    missing_caption,
    read_captions,
)
from smalti.data.datasets.sources import LISTED, Listed, MetadataSource
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.earlier import EarlierRows
from smalti.data.scan.image_sizes import read_header
from smalti.data.scan.index_file import SCHEMA
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.protocol import Storage, StorageError, TransientStorageError
from smalti.data.threads import Threads

Row = dict[str, object]
_Flags = NDArray[np.bool_]
_CHUNK = 32  # rows per task of a thread
_UNUSABLE: Row = {"captions": [], "width": 0, "height": 0, "content": 0}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Makes rows of a dataset. `earlier` are those of its last index."""

    spec: DatasetSpec
    storage: Storage
    source: MetadataSource
    earlier: EarlierRows

    def of(self, listed: pa.RecordBatch, pool: Threads) -> tuple[pa.RecordBatch, int]:
        """Returns the rows of listed samples (`LISTED`), and for how many of them files were opened.

        What else was listed, for columns, is in the rows as it is.
        """
        rows, opened = self._of(listed, pool)
        for name in listed.schema.names[len(LISTED) :]:
            rows = rows.append_column(listed.schema.field(name), listed.column(name))
        return rows, opened

    def _of(self, listed: pa.RecordBatch, pool: Threads) -> tuple[pa.RecordBatch, int]:
        old = self.earlier.find(listed.column("key"))
        captions, captioned = self._captions(listed, old)
        sizes, sized = _sizes(listed, old)
        problems, usable = self._problems(listed, captioned)
        missing = np.flatnonzero(usable & ~(captioned & sized))
        usable[missing] = False
        columns = {
            **{name: listed.column(name) for name in ("key", "etag", "size", "caption_etag", "place")},
            "problem": problems,
            **{name: pa.array(np.where(usable, values, 0), SCHEMA.field(name).type) for name, values in sizes.items()},
            "captions": _kept_lists(captions, usable),
        }
        rows = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
        if not len(missing):
            return rows, 0
        opened = self._opened(listed, old, missing, pool)
        order = np.arange(len(rows))
        order[missing] = len(rows) + np.arange(len(missing))
        return pa.concat_batches([rows, opened]).take(pa.array(order)), len(missing)

    def opens(self, listed: pa.RecordBatch) -> bool:
        """Whether `of` would open files."""
        old = self.earlier.find(listed.column("key"))
        captioned = self._captions(listed, old)[1]
        usable = self._problems(listed, captioned)[1]
        return bool((usable & ~(captioned & _sizes(listed, old)[1])).any())

    def _problems(self, listed: pa.RecordBatch, captioned: _Flags) -> tuple[pa.Array, _Flags]:
        """The problems of all rows that are known without opening files, and which rows have none."""
        problems = listed.column("problem")
        usable = _flags(pc.equal(problems, ""))
        if captions_are_listed(self.spec) and not captioned.all():
            problems = pc.if_else(pa.array(captioned | ~usable), problems, missing_caption(self.spec, ""))
            usable &= captioned
        return problems, usable

    def _captions(self, listed: pa.RecordBatch, old: pa.RecordBatch) -> tuple[pa.Array, _Flags]:
        """The captions of all rows, and for which they are right; those of the others need `read_captions`."""
        spec, known = self.spec, _flags(pc.is_valid(old.column("key")))
        if spec.only_instance_prompt or spec.caption_strategy == "instanceprompt":
            offsets = pa.array(np.arange(len(listed) + 1, dtype=np.int32))
            prompts = pa.array([spec.instance_prompt or ""]).take(pa.array(np.zeros(len(listed), dtype=np.int64)))
            return pa.ListArray.from_arrays(offsets, prompts), np.ones(len(listed), dtype=bool)
        if spec.caption_strategy == "filename":
            return old.column("captions"), known
        if depends_on_text_file(spec):
            same = _flags(pc.equal(listed.column("caption_etag"), old.column("caption_etag")))
            has_text = _flags(pc.not_equal(listed.column("caption_etag"), "")) | spec.instance_prompt_fallback
            return old.column("captions"), known & same & has_text
        captions = listed.column("captions")
        complete = _flags(pc.greater(pc.list_value_length(captions), 0))
        texts, lengths = captions.flatten(), pc.fill_null(pc.list_value_length(captions), 0).to_numpy()
        empty = _flags(pc.equal(texts, "")) | ~_flags(pc.is_valid(texts))
        owners = np.repeat(np.arange(len(listed)), lengths)
        if spec.caption_weights:  # then each caption has its own place, which may be empty
            complete = np.bincount(owners[~empty], minlength=len(listed)) > 0
        else:
            complete[owners[empty]] = False
        if spec.prepend_instance_prompt:
            joined = pc.if_else(pa.array(empty), "", pc.binary_join_element_wise(spec.instance_prompt or "", texts, " "))
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            captions = pa.ListArray.from_arrays(pa.array(offsets), joined)
        return captions, complete

    def _opened(self, listed: pa.RecordBatch, old: pa.RecordBatch, rows: NDArray[np.int64], pool: Threads) -> pa.RecordBatch:
        samples = [as_listed(row) for row in listed.select(LISTED.names).take(pa.array(rows)).to_pylist()]
        before = [row if row["key"] is not None else None for row in old.take(pa.array(rows)).to_pylist()]
        chunks = [range(start, min(start + _CHUNK, len(rows))) for start in range(0, len(rows), _CHUNK)]

        def made(chunk: range) -> list[Row]:
            return [self._row(samples[number], before[number]) for number in chunk]

        return pa.RecordBatch.from_pylist(list(chain.from_iterable(pool.map(made, chunks))), schema=SCHEMA)

    def _row(self, listed: Listed, old: Row | None) -> Row:
        """Returns the row of one sample: reused, or from its files."""
        row: Row = {name: getattr(listed, name) for name in ("key", "etag", "size", "caption_etag", "place")}
        try:
            row["captions"] = self._caption(listed, old)
            row["width"], row["height"], row["content"] = self._image(listed, old)
            row["problem"] = ""
        except TransientStorageError:
            raise
        except (BadSampleError, StorageError) as error:
            row |= _UNUSABLE | {"problem": _first_line(error)}
        return row

    def _caption(self, listed: Listed, old: Row | None) -> object:
        if old and depends_on_text_file(self.spec) and listed.caption_etag and old["caption_etag"] == listed.caption_etag:
            return old["captions"]
        return read_captions(self.spec, self.storage, listed)  # cheap where no file is read

    def _image(self, listed: Listed, old: Row | None) -> tuple[object, object, object]:
        """Width, height and content."""
        if listed.width is not None and listed.height is not None:
            return listed.width, listed.height, listed.content or 0
        if old and old["etag"] == listed.etag:
            return old["width"], old["height"], old["content"]
        from_source, from_storage = partial(self.source.read_range, listed.place), partial(self.storage.read_range, listed.key)
        header = read_header(from_source if listed.place else from_storage, listed.size)
        return header.width, header.height, header.content


def as_listed(row: Row) -> Listed:
    """A row of `LISTED` as an object."""
    captions = cast("Sequence[str] | None", row["captions"])
    return Listed(**row | {"captions": None if captions is None else tuple(captions)})  # type: ignore[arg-type]


def without_caption(rows: pa.RecordBatch) -> int:
    """How many rows are unusable for want of a caption, which they can only get by a change of files or table."""
    return int(pc.sum(pc.starts_with(rows.column("problem"), NO_CAPTION)).as_py() or 0)


def _sizes(listed: pa.RecordBatch, old: pa.RecordBatch) -> tuple[dict[str, NDArray[np.int64]], _Flags]:
    """Width, height and content of all rows, and for which they are known without opening the image."""
    given = _flags(pc.and_(pc.is_valid(listed.column("width")), pc.is_valid(listed.column("height"))))
    same = _flags(pc.equal(listed.column("etag"), old.column("etag")))
    sizes = {}
    for name in ("width", "height", "content"):
        before = pc.fill_null(old.column(name), 0).to_numpy()
        now = pc.fill_null(listed.column(name), 0).to_numpy()
        sizes[name] = np.where(given, now, np.where(same, before, 0))
    return sizes, given | same


def _kept_lists(lists: pa.Array, kept: _Flags) -> pa.Array:
    """The lists, empty where they are not kept, without nulls."""
    if kept.all() and not lists.null_count:
        return lists
    picked = lists.take(pa.array(np.arange(len(lists)), mask=~kept))
    return pa.ListArray.from_arrays(pa.array(picked.offsets.to_numpy()), picked.flatten())


def _flags(values: pa.Array) -> _Flags:
    """A column of truth values, with false for null."""
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False), dtype=bool)


def _first_line(error: Exception) -> str:
    message = error.message if isinstance(error, StorageError) else str(error)
    return message.partition("\n")[0]
