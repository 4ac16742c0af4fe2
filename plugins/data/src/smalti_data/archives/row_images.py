"""Images in the rows of parquet files or Arrow files: found and encoded in the order of the files, by row groups.

A row group can only be read as a whole. So reading images in a shuffled order costs a row group for each image, unless all of
them fit in memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from pydantic import ValidationError

from smalti import ConfigError, UserError
from smalti.data import (
    BadSampleError,
    DatasetSpec,
    Listed,
    ListedState,
    LocalStorage,
    Storage,
    StoredFile,
    read_header,
    wrong_values,
)
from smalti_data.archives.containers import ContainerSource, Contents, rows_of
from smalti_data.file_names import extension_of
from smalti_data.keys import ImageKeys
from smalti_data.parquet_files import explained_parquet, parquet_in
from smalti_data.tables.columns import Projection, TableColumns, column, leaf, leaves

MEMORY = 512 << 20
"""Bytes of row groups that are kept; the last one is kept in any case."""
_ROWS = 64  # decoded at once

_UNREAD = ("path", "filename_column", "width_column", "height_column", "aspect_ratio_column", "identifier_includes_extension")
_CAPTIONS = ("caption", "text", "prompt")
"""Columns that are the captions where the entry names none."""


class RowImages(ContainerSource):
    """The images of all parquet files of a storage, and of Arrow files as `save_to_disk` of the datasets library writes them.

    A sample's place is "FILE:ROW GROUP:ROW". Sizes need the images, so that a scan reads everything once.
    """

    kind = "parquet files"

    def __init__(self, spec: DatasetSpec, storage: Storage, block: Mapping[str, object] | None = None) -> None:
        super().__init__(spec, storage)
        options = spec.metadata_options if block is None else block
        given = {key: value for key, value in options.items() if key not in _UNREAD}
        try:
            self._columns = ImageKeys.model_validate(given)
        except ValidationError as error:
            raise ConfigError(list(wrong_values(error, given, f"dataset {spec.id!r}"))) from error
        self._captions = spec.caption_strategy == spec.metadata_backend and not spec.only_instance_prompt
        self._memory = _Memory(self._decoded)
        self._files: dict[str, _Groups] = {}
        self._lock = threading.Lock()
        self._bytes = self._groups = self._unchanged_cost = 0

    @property
    def recipe(self) -> object:
        return ["rows", self._columns.model_dump(mode="json"), self._captions, bool(self._spec.caption_weights)]

    @property
    def bytes_per_shuffled_image(self) -> int:
        """Bytes that reading one image in a shuffled order costs, as the last `list` found; 0 if all fit in memory."""
        return self._bytes // self._groups if self._bytes > MEMORY else self._unchanged_cost

    def containers(self) -> Sequence[StoredFile]:
        return [file for file in self._storage.list() if file.key.endswith((".parquet", ".arrow")) and not _hidden(file.key)]

    def is_unchanged(self, before: ListedState) -> bool:
        same = super().is_unchanged(before)
        if same:
            self._unchanged_cost = before.bytes_per_shuffled_image
        return same

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        self._bytes = self._groups = self._unchanged_cost = 0
        for batch in super().list_columns():
            self._bytes += pc.sum(batch.column("size")).as_py() or 0
            self._groups += pc.count_distinct(pc.replace_substring_regex(batch.column("place"), ":[0-9]+$", "")).as_py()
            yield batch
        if self.listed_state is not None:
            self.listed_state = replace(self.listed_state, bytes_per_shuffled_image=self.bytes_per_shuffled_image)

    def open(self, file: StoredFile) -> Contents:
        location = f"{self._storage.location}/{file.key}"
        found: list[Listed] = []
        with explained_parquet(location):
            groups = _groups(self._storage, file)
            image, projection = self._chosen(groups.schema, location)
            names = list(dict.fromkeys([image, *(projection.names if projection else ())]))
            for number in range(groups.count):
                row = 0
                for batch in groups.batches(number, names):
                    captions = projection.captions(batch).to_pylist() if projection else [None] * batch.num_rows
                    for data, texts in zip(_images(batch, image), captions, strict=True):
                        place, key = f"{file.key}:{number}:{row}", f"{file.key}/{len(found):09}"
                        found.append(_listed(key, place, data, None if texts is None else tuple(texts)))
                        row += 1
        return Contents(rows=rows_of(found))

    def read(self, place: str) -> bytes:
        key, group, row = place.rsplit(":", 2)
        images = self._memory.get((key, int(group)))
        if int(row) >= len(images) or not images[int(row)].is_valid:
            raise BadSampleError(f"{key} has no image in row {row} of row group {group}: the file has changed")
        return bytes(images[int(row)].as_buffer())

    def read_range(self, place: str, start: int, length: int) -> bytes:
        return self.read(place)[start : start + length]

    def _decoded(self, key: str, group: int) -> pa.Array:
        """The images of a row group, as an array of bytes."""
        location = f"{self._storage.location}/{key}"
        with explained_parquet(location):
            with self._lock:
                if key not in self._files:
                    self._files[key] = _groups(self._storage, self._storage.stat(key))
                groups = self._files[key]
            image, _ = self._chosen(groups.schema, location)
            return pa.concat_arrays([_bytes(batch, image) for batch in groups.batches(group, [image])])

    def _chosen(self, schema: pa.Schema, location: str) -> tuple[str, Projection | None]:
        """Returns the column of the images, and the columns of captions, if captions are in the file."""
        images = [field.name for field in schema if holds_images(field.type)]
        image = self._columns.image_column or next((name for name in images if name == "image"), None)
        image = image or (images[0] if len(images) == 1 else None)
        if image is None or (kind := leaf(schema, image)) is None or not holds_images(kind):
            message = (
                f"{location}: no column of images is named {image!r}" if image else f"{location}: which column is the image?"
            )
            raise UserError(message, fix=f"set image_column to one of: {', '.join(images) or 'none has images'}")
        if not self._captions:
            return image, None
        caption = self._columns.caption_column
        if caption is None:
            texts = [name for name in leaves(schema) if name.partition(".")[0] != image and holds_texts(leaf(schema, name))]
            known = [name for name in _CAPTIONS if name in texts] or (texts if len(texts) == 1 else [])
            if not known:
                fix = f"set caption_column to one of: {', '.join(texts)}" if texts else "set caption_strategy to instanceprompt"
                raise UserError(f"{location}: which column is the caption?", fix=fix)
            caption = known[0]
        columns = TableColumns(caption_column=caption, fallback_caption_column=self._columns.fallback_caption_column)
        weighted = bool(self._spec.caption_weights)
        return image, Projection(columns, schema, location, captions=True, weighted=weighted, only_captions=True)


class _Groups(ABC):
    """A file with images, as groups of rows that can only be read as a whole. Used by one thread at a time."""

    schema: pa.Schema
    count: int

    @abstractmethod
    def batches(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a group in order, a few at a time."""


class _ParquetGroups(_Groups):
    def __init__(self, opened: Callable[[], pq.ParquetFile]) -> None:
        self._file = opened()
        self._lock = threading.Lock()
        self.schema = self._file.schema_arrow
        self.count = self._file.num_row_groups

    def batches(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        with self._lock:
            yield from self._file.iter_batches(batch_size=_ROWS, row_groups=[number], columns=names, use_threads=False)


class _ArrowGroups(_Groups):
    """An Arrow file, in the stream format or the file format, mapped into memory."""

    def __init__(self, path: Path) -> None:
        source = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            self._batches = list(reader)
        self.schema = reader.schema
        self.count = len(self._batches)

    def batches(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        yield self._batches[number]


def _groups(storage: Storage, file: StoredFile) -> _Groups:
    if file.key.endswith(".parquet"):
        return _ParquetGroups(parquet_in(storage, file.key, file.size))
    if isinstance(storage, LocalStorage):
        return _ArrowGroups(Path(storage.location, file.key))
    message = f"{storage.location}/{file.key}: Arrow files are only read from a local folder"
    raise UserError(message, fix="copy them, or write parquet files")


class _Memory:
    """The row groups read last, up to `MEMORY` bytes. Threads that want the same one wait for the first of them."""

    def __init__(self, read: Callable[[str, int], pa.Array]) -> None:
        self._read = read
        self._kept: OrderedDict[tuple[str, int], Future[pa.Array]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, group: tuple[str, int]) -> pa.Array:
        with self._lock:
            future = self._kept.get(group)
            if mine := future is None:
                future = self._kept[group] = Future()
            self._kept.move_to_end(group)
        assert future is not None
        if mine:
            try:
                future.set_result(self._read(*group))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(group, None)
                future.set_exception(error)
                raise
            self._shrink()
        return future.result()

    def _shrink(self) -> None:
        with self._lock:
            done = {group: future.result().nbytes for group, future in self._kept.items() if future.done()}
            total = sum(done.values())
            for group, size in list(done.items())[:-1]:
                if total <= MEMORY:
                    return
                del self._kept[group]
                total -= size


def _listed(key: str, place: str, data: pa.Buffer | None, captions: tuple[str, ...] | None) -> Listed:
    """A sample; its etag is a digest of the image, so that a file that was downloaded again is the same."""
    if data is None:
        return Listed(key=key, size=0, etag="", place=place, problem="no image in the file, perhaps only its address")
    view = memoryview(data)
    etag = blake3(view).hexdigest(length=16)
    key += extension_of(view)
    try:
        header = read_header(lambda start, length: bytes(view[start : start + length]), len(view))
    except BadSampleError as error:
        return Listed(key=key, size=len(view), etag=etag, place=place, problem=str(error))
    return Listed(
        key=key, size=len(view), etag=etag, captions=captions, width=header.width, height=header.height, place=place,
        content=header.content,
    )  # fmt: skip


def holds_images(kind: pa.DataType) -> bool:
    """Whether a column has bytes, or structs with bytes, as the datasets library writes images."""
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return _is_binary(kind)


def _bytes(batch: pa.RecordBatch, image: str) -> pa.Array:
    values = column(batch, image)
    return pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values


def _images(batch: pa.RecordBatch, image: str) -> Iterator[pa.Buffer | None]:
    for value in _bytes(batch, image):
        yield value.as_buffer() if value.is_valid else None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def holds_texts(kind: pa.DataType | None) -> bool:
    """Whether a column has texts, or lists of them."""
    if kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = kind.value_type
    return kind is not None and bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _hidden(key: str) -> bool:
    return key.startswith(".") or "/." in key
