"""Checkpoints that torch and Accelerate have written, opened for conversion. Used in a process of its own.

    .metadata  __0_0.distcp ...                              torch.distributed.checkpoint
    pytorch_model_fsdp_0/  optimizer_0/                      Accelerate with SHARDED_STATE_DICT: two of those
    pytorch_model_fsdp.bin  optimizer.bin                    Accelerate with FULL_STATE_DICT

Tensors lie in pickles there. They are read by torch's loader for weights alone, which admits tensors and plain values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smalti import CheckpointError
from smalti_fsdp2.dcp_metadata import Chunk, Key, SavedTensor, Span, read_metadata
from smalti_fsdp2.state_dict import StateDicts, Value

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


def open_dcp(folder: Path) -> StateDicts:
    """A directory of torch.distributed.checkpoint."""
    return StateDicts(folder, _saved(folder))


def open_accelerate(folder: Path) -> StateDicts:
    """A directory of Accelerate's `save_state` under FSDP, of version 1 or 2."""
    values: dict[Key, Value] = {}
    for name in (_MODEL, _OPTIMIZER):
        shards, whole = folder / f"{name}_0", folder / f"{name}.bin"
        if shards.is_dir():
            values |= _saved(shards)
        elif whole.is_file():
            values |= {(name, *key): value for key, value in _leaves(_load(whole, mmap=True))}
    return StateDicts(folder, values)


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def _saved(folder: Path) -> dict[Key, Value]:
    found = read_metadata(folder / ".metadata")
    return {
        key: _Shards(folder=folder, saved=each) if isinstance(each, SavedTensor) else _Object(folder=folder, span=each)
        for key, each in found.items()
    }


@dataclass(frozen=True, kw_only=True)
class _Shards:
    """A tensor in chunks."""

    folder: Path
    saved: SavedTensor

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.saved.dtype)
        assert isinstance(dtype, torch.dtype), "the metadata were read with a list of them"
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    def load(self) -> Tensor:
        elements = torch.Size(self.shape).numel()
        chunks = self.saved.chunks
        # What is stored cannot be larger than the files, so nobody can make this take more memory than they have.
        stored = sum(chunk.span.length for chunk in chunks)
        if sum(torch.Size(chunk.shape).numel() for chunk in chunks) != elements or stored < elements * self.dtype.itemsize:
            raise CheckpointError(f"{self.folder}: the chunks of a tensor of shape {list(self.shape)} do not fill it")
        if len(chunks) == 1:
            return self._chunk(chunks[0])
        whole = torch.zeros(self.shape, dtype=self.dtype)
        for chunk in chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))
            whole[box].copy_(self._chunk(chunk))
        return whole

    def _chunk(self, chunk: Chunk) -> Tensor:
        tensor = _object(self.folder, chunk.span)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape or tensor.dtype != self.dtype:
            raise CheckpointError(f"{self.folder / chunk.span.file} does not hold at {chunk.span.offset} what .metadata says")
        return tensor


@dataclass(frozen=True, kw_only=True)
class _Object:
    """A value that is no tensor."""

    folder: Path
    span: Span
    dtype = None
    shape = None

    def load(self) -> object:
        return _object(self.folder, self.span)


def _object(folder: Path, span: Span) -> object:
    path = folder / span.file
    try:
        with path.open("rb") as file:
            file.seek(span.offset)
            data = file.read(span.length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != span.length:
        raise CheckpointError(f"{path} is shorter than .metadata says")
    return _load(io.BytesIO(data), path)


# --- torch.save -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """Something that was read already; tensors are mapped from their file and cost no memory yet."""

    value: object

    @property
    def dtype(self) -> torch.dtype | None:
        return self.value.dtype if isinstance(self.value, Tensor) else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else None

    def load(self) -> object:
        return self.value


def _leaves(value: object, key: Key = ()) -> list[tuple[Key, Value]]:
    """The values inside dictionaries and lists of dictionaries, by where they stand."""
    if isinstance(value, Mapping):
        return [leaf for name, item in value.items() for leaf in _leaves(item, (*key, name))]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [leaf for number, item in enumerate(value) for leaf in _leaves(item, (*key, number))]
    return [(key, _Loaded(value=value))]


def _load(source: Path | io.BytesIO, path: Path | None = None, *, mmap: bool = False) -> object:
    """What `torch.save` wrote, if it is tensors and plain values. Raises CheckpointError for anything else."""
    try:
        loaded: object = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "unsupported" in line.lower()), lines[0])
        raise CheckpointError(f"{path or source} is damaged, or has more than tensors and plain values: {reason}") from error
    return loaded
