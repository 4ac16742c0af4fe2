"""Host memory for weights that are streamed: pinned up to a limit, beyond it pages of files, which the system may drop."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from smalti import Config, UserError, World
from smalti.checkpoint import Arena
from smalti.config import RunOptions
from smalti.models import is_dry_run
from smalti.system import format_bytes
from smalti_memory.options import MemoryOptions

_SHARE = 0.75
"""Of the host memory that is free, what a node's ranks pin by default."""
_ALIGNMENT = 256
"""Bytes to which tensors within a range are aligned: what vectorised kernels want at most."""


class HostMemory:
    """Gives out ranges of memory for copies to a kind of device.

    `limit` is how many bytes may be pinned, `pinned` how many are. Files for the rest are in `folder` and have no names.
    """

    def __init__(self, kind: str, *, limit: int, folder: Path) -> None:
        self._kind, self._limit, self._folder = kind, limit, folder
        self.pinned = 0

    def take(self, size: int) -> tuple[Tensor, bool]:
        """A range, (bytes,), and whether it is pages of a file."""
        if self.pinned + size > self._limit:
            return self._mapped(size), True
        return self.pin(size), False

    def pin(self, size: int) -> Tensor:
        """A pinned range, whatever the limit."""
        self.pinned += size
        return Arena([size], self._kind).take(torch.Size([size]), torch.uint8)

    def _mapped(self, size: int) -> Tensor:
        if is_dry_run():
            return torch.empty(size, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # or else writing to the pages would kill the process
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            raise UserError(
                f"{format_bytes(size)} of streamed weights cannot be written to {self._folder}: {error.strerror}",
                fix="an --output_dir with more space, or a larger --pinned_gib",
            ) from error


def host_memory(config: Config, world: World) -> HostMemory:
    """Of a rank whose weights are streamed, as the options say."""
    kind, folder = torch.device(world.device).type, cast(Path, config[RunOptions].output_dir)
    return HostMemory(kind, limit=pin_limit(config, world), folder=folder)


def pin_limit(config: Config, world: World) -> int:
    """Bytes of host memory that a rank may pin for weights: those of the option, else its part of what is free on its node."""
    gib = config[MemoryOptions].pinned_gib if MemoryOptions in config else None
    return int(_SHARE * psutil.virtual_memory().available / world.local_size) if gib is None else int(gib * 2**30)


class Passage:
    """Pinned memory, (bytes,), through which pages of files go to the device, one range after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._passed: torch.Event | None = None

    def through(self, pages: Tensor) -> Tensor:
        """A copy of a range in pinned memory. The host waits until what passed there before has arrived.

        Queue its copy to the device at once, and tell `sent` the event after it.
        """
        if self._passed is not None:
            self._passed.synchronize()
        return self._memory[: len(pages)].copy_(pages)

    def sent(self, arrived: torch.Event) -> None:
        self._passed = arrived


class Layout:
    """Where in a range of memory the parts of tensors lie."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[tuple[int, Tensor]] = []

    def place(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Reserve room; returns what puts the tensor together from such a range, (bytes,)."""
        shape, stride, dtype, kind = tensor.shape, tensor.stride(), tensor.dtype, type(tensor)
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.place(getattr(tensor, name)) for name in names}
            return lambda memory: kind.__tensor_unflatten__(
                {name: build(memory) for name, build in inner.items()}, context, shape, stride
            )
        begin, end = self.size, self.size + tensor.nbytes
        self._parts.append((begin, tensor.detach()))
        self.size = -(-end // _ALIGNMENT) * _ALIGNMENT
        return lambda memory: memory[begin:end].view(dtype).view(shape)

    def fill(self, memory: Tensor) -> None:
        """Copy the parts of all tensors into a range."""
        for begin, part in self._parts:
            memory[begin : begin + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
