"""WebDataset: tar shards whose members with one name belong together, such as 0001.jpg, 0001.txt and 0001.json.

The name of a sample ends at the first dot of the file name, as in the webdataset library.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from smalti import ConfigError
from smalti.data import (
    EXTENSIONS,
    BadSampleError,
    DatasetSpec,
    Listed,
    LocalStorage,
    Storage,
    StorageError,
    StoredFile,
    read_header,
    wrong_values,
)
from smalti.system import load_json, open_regular
from smalti_data.archives.containers import ContainerSource, Contents, rows_of
from smalti_data.archives.tar_members import DamagedTarError, Member, Read, members
from smalti_data.keys import WebDatasetKeys

_NEAR = 20 << 10
"""Bytes read at once from a local file: a header, and often the caption and the beginning of the image."""
_STREAMED = 4 << 20
"""Bytes read at once from elsewhere while samples are small, so that the whole shard is read in a few requests."""
_APART = 64 << 10
"""Bytes read at once from elsewhere where samples are large."""
_LARGE = 2 << 20
"""Mean size of members in bytes above which a shard is not streamed."""
_LONGEST_TEXT = 1 << 20


class WebDataset(ContainerSource):
    """The images of all tar files of a storage."""

    kind = "tar shards"

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        super().__init__(spec, storage)
        try:
            self._members = WebDatasetKeys.model_validate(dict(spec.metadata_options))
        except ValidationError as error:
            where = f"dataset {spec.id!r}: webdataset"
            raise ConfigError(list(wrong_values(error, dict(spec.metadata_options), where))) from error
        self._captions = spec.caption_strategy == spec.metadata_backend and not spec.only_instance_prompt

    @property
    def recipe(self) -> object:
        return ["webdataset", self._members.model_dump(mode="json"), self._captions, self._spec.disable_multiline_split]

    def containers(self) -> Sequence[StoredFile]:
        return [file for file in self._storage.list() if file.key.lower().endswith(".tar") and not _hidden(file.key)]

    def open(self, file: StoredFile) -> Contents:
        with _reader(self._storage, file) as read:
            return _Shard(file, self._members, captions=self._captions, one_caption=self._spec.disable_multiline_split).read(
                read
            )

    def read(self, place: str) -> bytes:
        key, offset, length = _parsed(place)
        data = self._storage.read_range(key, offset, length)
        if len(data) != length:
            raise BadSampleError(f"{key} ends before byte {offset + length}")
        return data

    def read_range(self, place: str, start: int, length: int) -> bytes:
        key, offset, size = _parsed(place)
        return self._storage.read_range(key, offset + start, max(0, min(length, size - start)))


class _Shard:
    """Collects the samples of one shard."""

    def __init__(self, file: StoredFile, wanted: WebDatasetKeys, *, captions: bool, one_caption: bool) -> None:
        self._file = file
        self._wanted = wanted
        self._captions = captions
        self._one_caption = one_caption
        self._images: dict[str, Listed] = {}
        self._texts: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._problems: list[Listed] = []
        self._others: set[str] = set()

    def read(self, read: Read) -> Contents:
        notices = []
        try:
            for member in members(read, self._file.size):
                self._take(member, read)
        except DamagedTarError as error:
            if error.offset == 0:
                message = f"not a tar file: {error}; a compressed one must be decompressed"
                self._problems.append(Listed(key=f"{self._file.key}/", size=0, etag=self._file.etag, problem=message))
            else:
                notices.append(f"{self._file.key}: {error}; the {len(self._images)} images before that are used")
                place = f"{self._file.key}/byte {error.offset}"
                problem = f"the rest of the shard cannot be read: {error}"
                self._problems.append(Listed(key=place, size=0, etag=self._file.etag, problem=problem))
        if lost := len(self._others - self._images.keys()):
            notices.append(f"{self._file.key}: {lost} samples have no image")
        return Contents(rows=rows_of([*self._samples(), *self._problems]), notices=tuple(notices))

    def _samples(self) -> Iterator[Listed]:
        for sample, image in self._images.items():
            yield replace(image, captions=self._texts.get(sample, (0, ()))[1]) if self._captions else image

    def _take(self, member: Member, read: Read) -> None:
        name = posixpath.normpath(member.name)
        folder, base = posixpath.split(name)
        stem, _, extension = base.partition(".")
        if not stem:
            return  # hidden, such as the "._name" of macOS
        sample, extension = posixpath.join(folder, stem), extension.lower()
        if f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            only = self._wanted.image_extension
            if only is None or extension == only.lower().lstrip("."):
                self._take_image(sample, name, member, read)
            return
        self._others.add(sample)
        if self._captions and (rank := self._rank(extension)) and rank > self._texts.get(sample, (0, ()))[0]:
            data = read(member.offset, min(member.size, _LONGEST_TEXT))
            texts = _in_json(data, self._wanted.caption_key) if extension.endswith("json") else self._lines(data)
            self._texts[sample] = rank, texts

    def _lines(self, data: bytes) -> tuple[str, ...]:
        text = data.decode("utf-8-sig", "replace").strip()
        lines = [text] if self._one_caption else text.splitlines()
        return tuple(line.strip() for line in lines if line.strip())

    def _rank(self, extension: str) -> int:
        """How much a member is wanted as the caption; 0 if it is none."""
        if (only := self._wanted.caption_extension) is not None:
            return int(extension == only.lower().lstrip("."))
        return {"txt": 4, "caption": 3, "text": 2, "json": 1}.get(extension, 0)

    def _take_image(self, sample: str, name: str, member: Member, read: Read) -> None:
        if sample in self._images and self._wanted.image_extension is None:
            return
        key, etag = f"{self._file.key}/{name}", f"{self._file.etag}:{member.offset:x}"
        end = member.offset + member.size
        place = f"{self._file.key}:{member.offset}:{member.size}"
        problem, width, height, content = "", None, None, None
        if end > self._file.size:
            problem = f"the shard is truncated: it ends at byte {self._file.size}, the image at byte {end}"
        else:
            try:
                header = read_header(
                    lambda start, length: read(member.offset + start, min(length, member.size - start)), member.size
                )
                width, height, content = header.width, header.height, header.content
            except BadSampleError as error:
                problem = str(error)
        one = Listed(
            key=key, size=member.size, etag=etag, width=width, height=height, place=place, problem=problem, content=content
        )  # fmt: skip
        self._images[sample] = one


@contextmanager
def _reader(storage: Storage, file: StoredFile) -> Iterator[Read]:
    """Reads a shard from start to end, with few requests or system calls."""
    if isinstance(storage, LocalStorage):
        with _opened(Path(storage.location, file.key)) as descriptor:
            yield _Ahead(lambda at, length: os.pread(descriptor, length, at), lambda at, reads: _NEAR)
    else:
        yield _Ahead(
            lambda at, length: storage.read_range(file.key, at, length),
            lambda at, headers: _APART if headers and at > _LARGE * headers else _STREAMED,
        )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        with open_regular(path) as file:
            yield file.fileno()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", fix="check the disk") from error


class _Ahead:
    """Reads at least `window(offset, reads of 512 bytes so far)` bytes, and answers the next reads from them."""

    def __init__(self, read: Read, window: Callable[[int, int], int]) -> None:
        self._read = read
        self._window = window
        self._start = 0
        self._data = b""
        self._headers = 0

    def __call__(self, at: int, length: int) -> bytes:
        self._headers += length == 512
        start = at - self._start
        if start < 0 or start + length > len(self._data):
            self._start, start = at, 0
            self._data = self._read(at, max(length, self._window(at, self._headers)))
        return self._data[start : start + length]


def _parsed(place: str) -> tuple[str, int, int]:
    key, offset, length = place.rsplit(":", 2)
    return key, int(offset), int(length)


def _hidden(key: str) -> bool:
    return key.startswith(".") or "/." in key


def _in_json(data: bytes, keys: str | tuple[str, ...]) -> tuple[str, ...]:
    """The captions of a JSON member: a text, or a list of texts."""
    try:
        content = load_json(data)
    except ValueError:
        return ()
    for key in (keys,) if isinstance(keys, str) else keys:
        value: object = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        texts = value if isinstance(value, list) else [value]
        if found := tuple(text.strip() for text in texts if isinstance(text, str) and text.strip()):
            return found
    return ()
