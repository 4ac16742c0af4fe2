"""One block of host memory that many tensors share, pinned as one for copies from an accelerator."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from smalti.parallel import pins_memory

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
