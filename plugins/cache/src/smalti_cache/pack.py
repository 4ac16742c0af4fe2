"""Packs: files with many entries, which are written once and never changed.

A pack is a safetensors file. Its first tensors are columns with one value per entry, sorted by key (`COLUMNS`), the last one,
`data`, has the bytes of all entries. So opening it costs one short read and no work per entry.
A pack without `data` adds entries that other files hold: the parts that earlier versions wrote. An index of many packs has
the same form, with the names and sizes of these packs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint import Chunk, encode_header
from smalti.system import load_json
from smalti_cache.entries import Entry, Form, encode, forms_to_text
from smalti_cache.keys import Key, Keys

COLUMNS = {"high": "U64", "low": "U64", "offset": "U64", "length": "U32", "crc": "U32", "form": "U32", "file": "U32"}
"""Of each entry: its key, the first byte in the file and the number of bytes, their CRC-32, and which form and file."""
DTYPES: Mapping[str, np.dtype[Any]] = {"U64": np.dtype("<u8"), "U32": np.dtype("<u4")}
BYTES_PER_ENTRY = 40

Columns = Mapping[str, NDArray[Any]]

_VERSION = "1"
_FIRST_READ = 64 << 10
_LARGEST_HEADER = 32 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Where the entries of a pack are. `files` are names beside the pack; `columns["file"]` are places in that list.

    `packs` has names and sizes if this is the index of several packs.
    """

    columns: Columns
    forms: tuple[Form, ...]
    files: tuple[str, ...]
    packs: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["high"])

    @property
    def keys(self) -> Keys:
        return Keys(self.columns["high"], self.columns["low"])


@dataclass(kw_only=True)
class PackBuilder:
    """Entries that are collected until they make up a pack."""

    compress: bool = False
    size: int = 0
    _keys: list[Key] = field(default_factory=list)
    _data: list[bytes] = field(default_factory=list)
    _forms: dict[Form, int] = field(default_factory=dict)
    _form: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key, entry: Entry) -> None:
        form, data = encode(entry, compress=self.compress)
        self._keys.append(key)
        self._data.append(data)
        self._form.append(self._forms.setdefault(form, len(self._forms)))
        self.size += len(data)

    def build(self) -> bytes:
        """The pack as a file."""
        keys = Keys.of(self._keys)
        lengths = np.array([len(each) for each in self._data], dtype=np.uint64)
        columns = {
            "high": keys.high,
            "low": keys.low,
            "offset": np.cumsum(lengths) - lengths,
            "length": lengths,
            "crc": np.array([zlib.crc32(each) for each in self._data], dtype=np.uint32),
            "form": np.array(self._form, dtype=np.uint32),
            "file": np.zeros(len(keys), dtype=np.uint32),
        }
        order = keys.order()
        sorted_columns = {name: column[order] for name, column in columns.items()}
        return b"".join([encode_columns(sorted_columns, list(self._forms), data=self.size), *self._data])


def encode_columns(
    columns: Columns,
    forms: Sequence[Form],
    *,
    files: Sequence[str] = (),
    packs: Mapping[str, int] | None = None,
    data: int | None = None,
) -> bytes:
    """Returns the beginning of a pack. `data` is the number of bytes that follow; None if `files` hold the entries."""
    count = len(columns["high"])
    chunks = [(name, Chunk(dtype=kind, shape=(count,), offsets=(0,))) for name, kind in COLUMNS.items()]
    if data is not None:
        chunks.append(("data", Chunk(dtype="U8", shape=(data,), offsets=(0,))))
    notes = {"smalti_pack": _VERSION, "forms": forms_to_text(list(forms)), "files": json.dumps(list(files))}
    if packs:
        notes["packs"] = json.dumps(dict(packs))
    parts = [np.ascontiguousarray(columns[name], dtype=DTYPES[kind]).tobytes() for name, kind in COLUMNS.items()]
    return b"".join([encode_header(chunks, plain=True, notes=notes), *parts])


def read_pack(name: str, size: int, read: Callable[[int, int], bytes]) -> PackIndex | None:
    """Returns the index of a pack; None for the part of an earlier version (`earlier_parts`).

    `read` returns bytes from an offset on. Raises ValueError, KeyError or TypeError for an invalid file.
    """
    begun = _read_header(size, read)
    if begun is None:
        return None
    start, length, header = begun
    notes = header["__metadata__"]
    end = max(header[column]["data_offsets"][1] for column in COLUMNS)
    if len(start) < 8 + length + end:
        start += read(len(start), 8 + length + end - len(start))
    columns = {}
    for column, kind in COLUMNS.items():
        begin, stop = header[column]["data_offsets"]
        columns[column] = np.frombuffer(start[8 + length + begin : 8 + length + stop], dtype=DTYPES[kind])
    files = tuple(map(str, load_json(notes["files"])))
    if not files:
        columns["offset"] = columns["offset"] + np.uint64(8 + length + end)
    forms = tuple(map(Form.of_json, load_json(notes["forms"])))
    return PackIndex(columns=columns, forms=forms, files=files or (name,), packs=_packs(notes))


def read_packs(size: int, read: Callable[[int, int], bytes]) -> Mapping[str, int]:
    """Returns the names and sizes of the packs that an index is about, without its columns. Raises what `read_pack` raises."""
    begun = _read_header(size, read)
    return {} if begun is None else _packs(begun[2]["__metadata__"])


def _packs(notes: Mapping[str, str]) -> Mapping[str, int]:
    return {str(name): int(size) for name, size in load_json(notes.get("packs", "{}")).items()}


def _read_header(size: int, read: Callable[[int, int], bytes]) -> tuple[bytes, int, dict[str, Any]] | None:
    """Returns the beginning of a file, the length of its header, and that; None for the part of an earlier version."""
    start = read(0, min(size, _FIRST_READ))
    if len(start) < 8:
        raise ValueError("it is too short")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(size - 8, _LARGEST_HEADER):
        raise ValueError("its header is longer than the file")
    if b'"smalti_pack":' not in start[:256]:
        return None
    if len(start) < 8 + length:
        start += read(len(start), 8 + length - len(start))
    header = load_json(start[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    notes = header["__metadata__"]
    end = max((tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise ValueError("its size does not match its header")
    if notes["smalti_pack"] != _VERSION:
        raise ValueError(f"it is a pack of version {notes['smalti_pack']}, and this version of smalti reads {_VERSION}")
    return start, length, header
