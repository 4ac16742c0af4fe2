"""The header of a safetensors file: which chunks of which tensors it has, and where.

The layout is that of torch's sharded safetensors checkpoints: a chunk is stored under the name of its tensor, and the file's
metadata have its offsets in the complete tensor. A file without such metadata has complete tensors.

Importing this module imports no torch. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from smalti.errors import CheckpointError
from smalti.system import parse_json

ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every type that a checkpoint may hold, by its name in the format."""

F = TypeVar("F")
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
_LARGEST_HEADER = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a tensor, or all of it: it starts at `offsets` and has this `shape`."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A complete tensor in the files of a directory. `chunks` is the number of chunks that it is stored in.

    `dtype` is a type of safetensors, one of `smalti.checkpoint.ITEM_SIZES`: "F32" and "BF16", not torch's "float32".
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * ITEM_SIZES[self.dtype]

    @property
    def whole(self) -> Chunk:
        """All of it as one chunk."""
        return Chunk(dtype=self.dtype, shape=self.shape, offsets=(0,) * len(self.shape))


def encode_header(chunks: Sequence[tuple[str, Chunk]], *, plain: bool = False, notes: Mapping[str, str] | None = None) -> bytes:
    """Returns the header of a file with these named chunks, in this order.

    A `plain` header has no offsets of chunks, so it is for complete tensors only. `notes` are additional metadata of the file.
    """
    metadata = {"format": "pt", **(notes or {})}
    if not plain:
        sharding = {name: {"saved_offsets": chunk.offsets} for name, chunk in chunks}
        metadata |= {"DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    body: dict[str, object] = {_METADATA: metadata}
    start = 0
    for name, chunk in chunks:
        body[name] = {"dtype": chunk.dtype, "shape": chunk.shape, "data_offsets": [start, start + chunk.size]}
        start += chunk.size
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(f"{len(chunks)} tensors are too many for one file")
    text += b" " * (-len(text) % 8)  # data start at a multiple of 8, so that they can be mapped into memory
    return struct.pack("<Q", len(text)) + text


def split(chunks: Mapping[str, Chunk], limit: int) -> list[list[str]]:
    """Returns the names of these chunks, split into files of at most `limit` bytes; a larger chunk has its own file."""
    parts: list[list[str]] = []
    available = 0
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    for name in sorted(chunks, key=lambda name: (-ITEM_SIZES[chunks[name].dtype], name)):
        if not parts or available < chunks[name].size:
            parts.append([])
            available = limit
        parts[-1].append(name)
        available -= chunks[name].size
    return parts


def read_layout(path: Path) -> dict[str, tuple[Chunk, int]]:
    """Returns the chunks in a file and the bytes at which they start, by tensor name.

    Checks that they fill the file exactly; reads no tensor data. Raises CheckpointError, to which the caller adds the name of
    the file, for anything but a valid safetensors file: a pickle, a truncated file, a wrong header.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is not a valid safetensors file: not a regular file")
        with path.open("rb") as file:

            def read(start: int, length: int) -> bytes:
                file.seek(start)
                return file.read(length)

            return decode_layout(read, status.st_size)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error


def decode_layout(read: Callable[[int, int], bytes], size: int) -> dict[str, tuple[Chunk, int]]:
    """As `read_layout`, of a file of `size` bytes of which `read` returns a range: its start and its length."""
    try:
        if size < 8:
            raise ValueError("too short")
        length = int.from_bytes(read(0, 8), "little")
        if length > min(_LARGEST_HEADER, size - 8):
            raise ValueError("the header is longer than the file")
        chunks = _chunks(parse_json(read(8, length)), data=size - 8 - length)
        return {name: (chunk, 8 + length + begin) for name, (chunk, begin) in chunks.items()}
    except ValueError as error:
        raise CheckpointError(f"is not a valid safetensors file: {error}") from None


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns all tensors in the safetensors files of a directory; none if there is no such directory.

    Raises CheckpointError if chunks of one tensor disagree or leave a gap.
    """
    return assemble_tensors(map(str, sorted(directory.glob("*.safetensors"))), lambda name: read_layout(Path(name)))


def assemble_tensors(files: Iterable[str], layout: Callable[[str], Mapping[str, tuple[Chunk, int]]]) -> dict[str, StoredTensor]:
    """As `stored_tensors`, of the tensors in some files, each of which has a `layout` like that of `read_layout`."""
    return {name: join(name, [chunk for _, chunk, _ in found]) for name, found in chunk_places(files, layout).items()}


def chunk_places(
    files: Iterable[F], layout: Callable[[F], Mapping[str, tuple[Chunk, int]]]
) -> dict[str, list[tuple[F, Chunk, int]]]:
    """The chunks of each tensor with the file of each and where it starts there, sorted by name."""
    places: dict[str, list[tuple[F, Chunk, int]]] = {}
    for file in files:
        try:
            found = layout(file)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error.message}") from error
        for name, (chunk, position) in found.items():
            places.setdefault(name, []).append((file, chunk, position))
    return dict(sorted(places.items()))


def join(name: str, chunks: Sequence[Chunk]) -> StoredTensor:
    """Returns the tensor that these chunks make up. Raises CheckpointError if they disagree or leave a gap."""
    first = chunks[0]
    if any(chunk.dtype != first.dtype or len(chunk.shape) != len(first.shape) for chunk in chunks):
        raise CheckpointError(f"the chunks of {name} differ in type or number of dimensions")
    ends = [[start + length for start, length in zip(p.offsets, p.shape, strict=True)] for p in chunks]
    tensor = StoredTensor(dtype=first.dtype, shape=tuple(max(column) for column in zip(*ends, strict=True)), chunks=len(chunks))
    if sum(math.prod(chunk.shape) for chunk in chunks) != tensor.elements:
        raise CheckpointError(f"the chunks of {name} do not fill it")
    if _overlap(chunks):
        raise CheckpointError(f"chunks of {name} overlap")
    return tensor


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two chunks have an element in common. They are compared in the order of their first rows."""
    boxes = sorted(tuple(zip(chunk.offsets, chunk.shape, strict=True)) for chunk in chunks)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box and other[0][0] >= sum(box[0]):
                break  # and so do all after it
            if all(max(one, two) < min(one + here, two + there) for (one, here), (two, there) in zip(box, other, strict=True)):
                return True
    return False


def _chunks(header: object, data: int) -> dict[str, tuple[Chunk, int]]:
    """Returns the chunks and where in the data they start; each of the `data` bytes after the header must belong to one."""
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    offsets = _saved_offsets(header.pop(_METADATA, {}))
    chunks: dict[str, tuple[Chunk, int]] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the entry of {name} is malformed")
        shape = _counts(entry["shape"], name)
        start = _counts(offsets[name], name) if name in offsets else (0,) * len(shape)
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or len(start) != len(shape):
            raise ValueError(f"the entry of {name} is malformed")
        if dtype not in ITEM_SIZES:
            raise ValueError(f"{name} has the type {dtype}, which is unknown")
        chunk = Chunk(dtype=dtype, shape=shape, offsets=start)
        span = _counts(entry["data_offsets"], name)
        if len(span) != 2 or span[1] - span[0] != chunk.size:
            raise ValueError(f"{name} does not have the size of its shape")
        chunks[name] = chunk, span[0]
        spans.append((span[0], span[1]))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError("tensors overlap or leave a gap")
        position = end
    if position != data:
        raise ValueError(f"{data} bytes of data where the header says {position}")
    return chunks


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
