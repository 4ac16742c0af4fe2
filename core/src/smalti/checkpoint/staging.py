"""Copies the state to host memory while the next step computes.

Weights, optimizer state and EMA do not change before the next optimizer step, so the copy may take as long as forward and
backward do. A rank copies only what it is going to write, into one block of host memory that many tensors share.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from smalti.checkpoint.planning import plan_on_all_ranks
from smalti.checkpoint.snapshot import Snapshot
from smalti.parallel import Communicator, local_part, pins_memory, side_stream

_ALIGNMENT = 64
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every thread of the process."""
_log = logging.getLogger(__name__)


class Arena:
    """Memory for tensors of the given sizes in bytes, which `take` returns in that order.

    torch rounds each block of pinned memory up to a power of two and never releases it: for the shards of a large model that is
    50 % more memory that cannot be swapped. On CUDA devices this is ordinary memory of the exact size instead, which is then
    registered. If the system refuses to pin it, it is used unpinned, and copies are slower.
    """

    def __init__(self, sizes: list[int], kind: str) -> None:
        length = sum(map(_aligned, sizes))
        self._registered: int | None = None
        self._taken = 0
        if kind == "cuda":
            self._memory = torch.empty(length, dtype=torch.uint8)
            self._register(length)
        else:
            self._memory = torch.empty(length, dtype=torch.uint8, pin_memory=pins_memory(kind))

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the next part, as an uninitialized tensor."""
        size = shape.numel() * dtype.itemsize
        chunk = self._memory[self._taken : self._taken + size]
        self._taken += _aligned(size)
        return chunk.view(dtype).view(shape)

    def release(self) -> None:
        """Unpin the memory; afterwards nothing that was taken may be used."""
        if self._registered is not None:
            _runtime().cudaHostUnregister(self._registered)
            self._registered = None

    def _register(self, length: int) -> None:
        address = self._memory.data_ptr()
        error = int(_runtime().cudaHostRegister(address, length, _PORTABLE)) if length else 0
        if error:
            _log.warning("cannot pin %.1f GiB of host memory (CUDA error %d): saves copy more slowly", length / 2**30, error)
        elif length:
            self._registered = address


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """Buffers in host memory, kept from one save to the next; pinned where tensors come from an accelerator."""

    def __init__(self, device: str) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._layout: Mapping[str, object] = {}
        self._arena: Arena | None = None
        self._stream = side_stream(device)

    def wait_for_current_stream(self) -> None:
        """Call it in the loop's thread: copies start after the work that this thread has queued on the accelerator."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    @torch.no_grad()  # without gradients, to_local returns the part itself and no view, which takes less time
    def copy(self, snapshot: Snapshot, communicator: Communicator) -> Snapshot:
        """Returns the snapshot in host memory, valid until the next call. *Collective*.

        Tensors that another rank writes are on the meta device: they have a shape and no contents.
        """
        tensors = snapshot.tensors()
        mine = plan_on_all_ranks(communicator, tensors).mine
        written = {name: tensor.detach() for name, tensor in tensors.items() if name in mine}
        parts = {name: local_part(tensor) for name, tensor in written.items()}
        self._allocate(written, parts)
        with self._stream or nullcontext():
            for name, buffer in self._buffers.items():
                local_part(buffer).copy_(parts[name], non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
        other = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items() if name not in mine}
        return snapshot.replaced({**self._buffers, **other})

    def _allocate(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Allocate a buffer for each tensor, or reuse those of the previous save if the tensors are alike.

        `parts` is what this rank holds of each.
        """
        layout = {name: (part.dtype, part.shape, tensors[name].device) for name, part in parts.items()}
        if layout == self._layout:
            return
        self._layout, self._buffers = {}, {}
        if self._arena is not None:
            self._arena.release()
        on_device = [part for name, part in parts.items() if tensors[name].device.type != "cpu"]
        self._arena = Arena([tensor.nbytes for tensor in on_device], on_device[0].device.type) if on_device else None
        self._buffers = {name: self._buffer(tensor) for name, tensor in tensors.items()}
        self._layout = layout

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = torch.empty_like(like, device="cpu", requires_grad=False)
        if self._arena is not None and like.device.type != "cpu":
            # The pages of its own memory were not touched yet.
            local = local_part(buffer)
            memory = self._arena.take(local.shape, local.dtype)
            local.set_(memory.as_strided(local.shape, local.stride()))  # type: ignore[call-overload]
        return buffer


def frozen(snapshot: Snapshot, names: Collection[str]) -> Snapshot:
    """Returns the snapshot with copies of these tensors of the model: buffers, which a forward pass may change."""
    model = snapshot.state.model
    copies = {f"model/{name}": model[name].detach().clone() for name in names if name in model}
    return snapshot.replaced(snapshot.tensors() | copies)
