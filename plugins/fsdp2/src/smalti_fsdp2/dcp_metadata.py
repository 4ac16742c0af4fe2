"""Reads `.metadata`, the pickle in which torch.distributed.checkpoint says what its files hold, without running any of it.

The pickle may name the few classes that DCP puts there and no others. Each is replaced by one of ours that only keeps its
fields, so that no code of torch or of anyone else runs either. Importing this module imports no torch.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from smalti import CheckpointError

Key = tuple[str | int, ...]
"""Where a value stands in the dictionaries that were saved: ("model", "blocks.0.weight")."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes of a file: one object as `torch.save` writes it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in chunks. `dtype` is its name in torch, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Saved = Mapping[Key, SavedTensor | Span]
"""What a checkpoint holds: tensors, and where other values are stored."""


def read_metadata(path: Path) -> Saved:
    """What a `.metadata` file says. Raises CheckpointError for anything that DCP does not write, naming it."""
    try:
        with path.open("rb") as file:
            body = _Unpickler(file).load()
        return _saved(body)
    except (pickle.UnpicklingError, EOFError, IndexError) as error:
        raise CheckpointError(f"{path} is not valid metadata of torch.distributed.checkpoint: {error}") from error
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not what torch.distributed.checkpoint writes: {error}") from error


class _Record:
    """Stands for a class of torch: keeps the fields and does nothing."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getattr__(self, name: str) -> object:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            value: object = state[name]
            return value
        raise AttributeError(f"{type(self).__name__} has no {name}")


def _keep(*values: object) -> object:
    """Stands for what is called in the pickle: a size, a path, a memory format."""
    return values


_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name): type(name, (_Record,), {})
    for name in (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_Record,), {})}
_VALUES: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _keep,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _keep,
    ("pathlib", "PosixPath"): _keep,
    ("pathlib", "WindowsPath"): _keep,
    ("collections", "OrderedDict"): OrderedDict,
}
_DTYPES = frozenset(
    (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("complex64", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (found := _RECORDS.get((module, name)) or _VALUES.get((module, name))) is not None:
            return found
        if module == "torch" and name in _DTYPES:
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place there; nothing of it was run")


def _saved(body: object) -> Saved:
    keys: Mapping[str, Key] = body.planner_data or {}  # type: ignore[attr-defined]
    spans: dict[tuple[str, tuple[int, ...] | None], Span] = {}
    for index, info in body.storage_data.items():  # type: ignore[attr-defined]
        offset = getattr(index, "offset", None)
        spans[index.fqn, None if offset is None else tuple(offset)] = _span(info)
    saved: dict[Key, SavedTensor | Span] = {}
    for name, entry in body.state_dict_metadata.items():  # type: ignore[attr-defined]
        key = tuple(keys.get(name, (name,)))
        if type(entry).__name__ == "BytesStorageMetadata":
            saved[key] = spans[name, None]
            continue
        chunks = tuple(
            Chunk(offsets=_sizes(c.offsets), shape=_sizes(c.sizes), span=spans[name, tuple(c.offsets)]) for c in entry.chunks
        )
        saved[key] = SavedTensor(dtype=str(entry.properties.state[0]), shape=_sizes(entry.size), chunks=chunks)
    return saved


def _span(info: object) -> Span:
    file, offset, length = info.relative_path, info.offset, info.length  # type: ignore[attr-defined]
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file beside it")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"bytes {offset!r} and {length!r} of {file}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{file} is encoded with {', '.join(map(str, info.transform_descriptors))}")  # type: ignore[attr-defined]
    return Span(file=file, offset=offset, length=length)


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(item) is not int or item < 0 for item in value):
        raise ValueError(f"{value!r} is not a size")
    return value
