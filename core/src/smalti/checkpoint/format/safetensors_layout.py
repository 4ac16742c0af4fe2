"""The header of a safetensors file: which pieces of which tensors lie where.

The layout is that of torch's sharded safetensors checkpoints: a piece is stored under the name of its tensor, and the file's
metadata tell at which offsets in the whole tensor it starts. A file without such metadata holds whole tensors.

Importing this module imports no torch. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti.errors import CheckpointError
from smalti.system import parse_json

ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every type that a checkpoint may hold, by its name in the format."""

_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
_LARGEST_HEADER = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box cut out of a tensor, or the whole of it. `offsets` is where the box starts, `shape` how far it reaches."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor as the files of a directory hold it: in `pieces` boxes that fill it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * ITEM_SIZES[self.dtype]


def encode_header(pieces: Sequence[tuple[str, Piece]], *, plain: bool = False, notes: Mapping[str, str] | None = None) -> bytes:
    """What a file that holds these named pieces, one after the other in this order, starts with.

    A `plain` one says nothing of where pieces lie in their tensors: it is for whole tensors only. `notes` are further entries
    of the file's metadata.
    """
    metadata = {"format": "pt", **(notes or {})}
    if not plain:
        sharding = {name: {"saved_offsets": piece.offsets} for name, piece in pieces}
        metadata |= {"DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    body: dict[str, object] = {_METADATA: metadata}
    start = 0
    for name, piece in pieces:
        body[name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [start, start + piece.size]}
        start += piece.size
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(f"{len(pieces)} tensors are too many for one file")
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8, so that they can be mapped into memory
    return struct.pack("<Q", len(text)) + text


def split(pieces: Mapping[str, Piece], limit: int) -> list[list[str]]:
    """The names of these pieces, shared out to files of at most `limit` bytes; a larger piece has a file of its own."""
    parts: list[list[str]] = []
    room = 0
    # Wide elements first: then every tensor starts at a multiple of its element size.
    for name in sorted(pieces, key=lambda name: (-ITEM_SIZES[pieces[name].dtype], name)):
        if not parts or room < pieces[name].size:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= pieces[name].size
    return parts


def read_header(path: Path) -> dict[str, Piece]:
    """The pieces in a file, by tensor name: `read_layout` without the places."""
    return {name: piece for name, (piece, _) in read_layout(path).items()}


def read_layout(path: Path) -> dict[str, tuple[Piece, int]]:
    """The pieces in a file and the bytes at which they start, by tensor name.

    Checks that they fill the file exactly; reads no tensor data. Raises CheckpointError, which leaves naming the file to the
    caller, for anything but a sound safetensors file: a pickle, a truncated file, a header that lies.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            if status.st_size < 8:
                raise ValueError("too short")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LARGEST_HEADER, status.st_size - 8):
                raise ValueError("the header is longer than it can be")
            pieces = _pieces(parse_json(file.read(length)), data=status.st_size - 8 - length)
            return {name: (piece, 8 + length + begin) for name, (piece, begin) in pieces.items()}
    except ValueError as error:
        raise CheckpointError(f"is not a sound safetensors file: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors in the safetensors files of a directory; none when there is no such directory.

    Raises CheckpointError when pieces of one tensor disagree or leave a gap.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            header = read_header(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error.message}") from error
        for name, piece in header.items():
            pieces.setdefault(name, []).append(piece)
    return {name: join(name, found) for name, found in sorted(pieces.items())}


def join(name: str, pieces: Sequence[Piece]) -> StoredTensor:
    """The tensor that these pieces make up. Raises CheckpointError when they disagree or leave a gap."""
    first = pieces[0]
    if any(piece.dtype != first.dtype or len(piece.shape) != len(first.shape) for piece in pieces):
        raise CheckpointError(f"the pieces of {name} are of different kinds")
    ends = [[start + length for start, length in zip(p.offsets, p.shape, strict=True)] for p in pieces]
    whole = StoredTensor(dtype=first.dtype, shape=tuple(max(column) for column in zip(*ends, strict=True)), pieces=len(pieces))
    if sum(math.prod(piece.shape) for piece in pieces) != whole.elements:
        raise CheckpointError(f"the pieces of {name} do not fill it")
    if _overlap(pieces):
        raise CheckpointError(f"pieces of {name} overlap")
    return whole


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two pieces hold the same element. They are looked at in the order of their first rows."""
    boxes = sorted(tuple(zip(piece.offsets, piece.shape, strict=True)) for piece in pieces)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box and other[0][0] >= sum(box[0]):
                break  # and so do all after it
            if all(max(one, two) < min(one + here, two + there) for (one, here), (two, there) in zip(box, other, strict=True)):
                return True
    return False


def _pieces(header: object, data: int) -> dict[str, tuple[Piece, int]]:
    """The pieces and where in the data they start; `data` bytes follow the header, all of which must belong to a piece."""
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    offsets = _saved_offsets(header.pop(_METADATA, {}))
    pieces: dict[str, tuple[Piece, int]] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the entry of {name} is malformed")
        shape = _counts(entry["shape"], name)
        start = _counts(offsets[name], name) if name in offsets else (0,) * len(shape)
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES or len(start) != len(shape):
            raise ValueError(f"the entry of {name} is malformed")
        piece = Piece(dtype=dtype, shape=shape, offsets=start)
        span = _counts(entry["data_offsets"], name)
        if len(span) != 2 or span[1] - span[0] != piece.size:
            raise ValueError(f"{name} does not have the bytes that its shape asks for")
        pieces[name] = piece, span[0]
        spans.append((span[0], span[1]))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError("tensors overlap or leave a gap")
        position = end
    if position != data:
        raise ValueError(f"{data} bytes of data where the header says {position}")
    return pieces


def _saved_offsets(metadata: object) -> dict[str, object]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata are malformed")
    sharding = parse_json(metadata.get(_SHARDING, "{}").encode())
    if not isinstance(sharding, dict):
        raise ValueError("the sharding metadata are malformed")
    offsets: dict[str, object] = {}
    for name, entry in sharding.items():
        if not isinstance(entry, dict) or entry.keys() != {"saved_offsets"}:
            raise ValueError(f"the sharding metadata of {name} are malformed")
        offsets[name] = entry["saved_offsets"]
    return offsets


def _counts(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise ValueError(f"the entry of {name} is malformed")
    return tuple(value)
