"""Entries as bytes: small groups of tensors, optionally compressed, without repeated last rows.

The layout of an entry is its `Form`. Most entries of a pack share one, so it is stored once per pack. A form says everything
that is needed to read an entry, so compression can be switched on and off at any time. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from smalti.checkpoint import ITEM_SIZES

if TYPE_CHECKING:
    from torch import Tensor

Entry: TypeAlias = "Mapping[str, Tensor]"
"""Tensors by name. Names contain no "/"."""

_ZSTD = "shuffle+zstd"


@dataclass(frozen=True)
class StoredPart:
    """One tensor of an entry: `rows` of its first dimension are stored, and the last of them stands for the rest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.rows, *self.shape[1:]) if self.shape else ()

    @property
    def size(self) -> int:
        """Bytes before compression."""
        return math.prod(self.stored_shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Form:
    """The layout of entries.

    Args:
        parts: the tensors, widest elements first, so that each starts at a multiple of its element size.
        codec: "" for tensors one after the other; "shuffle+zstd" if the bytes of each tensor are regrouped, first bytes of all
            elements first, and all of it is compressed with zstd.
        checked: whether entries have a checksum (CRC-32 of the stored bytes).
    """

    parts: tuple[StoredPart, ...]
    codec: str = ""
    checked: bool = True

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def to_json(self) -> list[object]:
        return [[[part.name, part.dtype, list(part.shape), part.rows] for part in self.parts], self.codec, self.checked]

    @classmethod
    def of_json(cls, value: list[object]) -> Form:
        """Raises ValueError, KeyError or TypeError."""
        parts, codec, checked = value
        if codec not in ("", _ZSTD) or not isinstance(parts, list):
            raise ValueError(f"entries are encoded as {codec!r}, which this version does not know")
        found = (StoredPart(str(name), str(dtype), tuple(map(int, shape)), int(rows)) for name, dtype, shape, rows in parts)
        return cls(tuple(found), str(codec), bool(checked))


def forms_to_text(forms: list[Form]) -> str:
    return json.dumps([form.to_json() for form in forms], separators=(",", ":"))


def encode(entry: Entry, *, compress: bool) -> tuple[Form, bytes]:
    """Returns an entry as bytes, and their form. Reading gives the same tensors, bit for bit."""
    import torch

    from smalti.checkpoint import NAMES

    parts, pieces = [], []
    for name, tensor in sorted(entry.items(), key=lambda item: (-item[1].element_size(), item[0])):
        shape = tuple(tensor.shape)
        array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        rows = _different_rows(array.reshape(shape[0], -1)) if len(shape) > 1 and array.size else (shape[0] if shape else 1)
        part = StoredPart(name, NAMES[tensor.dtype], shape, rows)
        parts.append(part)
        pieces.append(array[: part.size])
    if not compress:
        return Form(tuple(parts)), b"".join(piece.tobytes() for piece in pieces)
    shuffled = (piece.reshape(-1, ITEM_SIZES[part.dtype]).T.tobytes() for part, piece in zip(parts, pieces, strict=True))
    return Form(tuple(parts), _ZSTD), bytes(pa.Codec("zstd", compression_level=1).compress(b"".join(shuffled), asbytes=True))


def decode(form: Form, stored: bytes) -> dict[str, Tensor]:
    """Returns the tensors of an entry, on the CPU. Raises ValueError for bytes that are not of this form."""
    if form.codec == _ZSTD:
        try:
            raw = bytearray(pa.Codec("zstd").decompress(stored, decompressed_size=form.size, asbytes=True))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{error}") from error
    else:
        raw = bytearray(stored)
    if len(raw) != form.size:
        raise ValueError(f"it has {len(raw)} bytes instead of {form.size}")
    found, start = {}, 0
    for part in form.parts:
        if form.codec == _ZSTD and ITEM_SIZES[part.dtype] > 1 and part.size:
            grouped = np.frombuffer(raw, dtype=np.uint8, count=part.size, offset=start).reshape(ITEM_SIZES[part.dtype], -1)
            data, begin = bytearray(grouped.T.tobytes()), 0
        else:
            data, begin = raw, start
        found[part.name] = _tensor(part, data, begin)
        start += part.size
    return found


def _tensor(part: StoredPart, data: bytearray, begin: int) -> Tensor:
    import torch

    from smalti.checkpoint import DTYPES

    kind, count = DTYPES[part.dtype], math.prod(part.stored_shape)
    flat = torch.frombuffer(data, dtype=kind, count=count, offset=begin) if count else torch.empty(0, dtype=kind)
    tensor = flat.view(part.stored_shape)
    if part.shape and part.rows < part.shape[0]:
        tensor = torch.cat([tensor, tensor[-1:].expand(part.shape[0] - part.rows, *part.shape[1:])])
    return tensor


def _different_rows(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> int:
    """Returns how many rows there are up to the first of those at the end that are all the same, bit for bit."""
    if len(rows) < 2 or not np.array_equal(rows[-1], rows[-2]):
        return len(rows)
    others = np.flatnonzero((rows != rows[-1]).any(axis=1))
    return int(others[-1]) + 2 if len(others) else 1
