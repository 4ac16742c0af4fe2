"""Streams on a CPU whose copies take time: what is copied holds no numbers until something waits for it."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LateCopies(TorchDispatchMode):
    """Copies that were queued in a stream arrive as late as they may.

    That is when something is computed in the same stream, or another one waits for it. torch's CPU streams have an order only
    within `streams`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queued: dict[torch.cpu.Stream, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.arrived = 0

    def add(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy in the current stream. Until it arrives, the target holds NaN in every floating-point type."""
        target.fill_(255)
        self.queued[torch.cpu.current_stream()].append((target, source))

    def arrive(self, stream: torch.cpu.Stream) -> None:
        for target, source in self.queued.pop(stream, ()):
            target.copy_(source)
            self.arrived += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):  # a view
            self.arrive(torch.cpu.current_stream())
        return func(*args, **(kwargs or {}))

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Streams of the CPU wait for each other meanwhile. A stream is its own event: what is queued in it."""
        stream = torch.cpu.Stream
        waits = (
            patch.object(stream, "wait_stream", lambda _, other: self.arrive(other)),
            patch.object(stream, "wait_event", lambda _, event: self.arrive(event)),
            patch.object(stream, "record_event", lambda own, *_: own),
            patch.object(torch.accelerator, "current_stream", lambda *_: torch.cpu.current_stream()),
        )
        with ExitStack() as patched:
            for each in (*waits, self):
                patched.enter_context(each)
            yield
