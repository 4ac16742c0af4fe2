"""How long steps take on this rank, and the forward passes in them: its own work, without waiting for other ranks.

The time of a whole step is the same on all ranks, because each waits for the slowest. With sharded weights a forward pass waits
for other ranks too, and then no rank stands out.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEPT = 200
_WITH_TIMED_EVENTS = ("cuda", "xpu")
"""Accelerators, ROCm's among them, whose events tell the time between them."""


class StepTimes:
    """The durations of the latest steps, in seconds. Written by the loop, read by other threads."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def p95(self) -> float | None:
        """Their 95th percentile; None before the first. That one, which can be long, counts only at the beginning."""
        known = sorted(self._seconds.copy())
        return known[math.ceil(0.95 * len(known)) - 1] if known else None


class ForwardTime:
    """Of one step on one rank. Measuring never waits for the accelerator; where its events tell no time, nothing is."""

    def __init__(self, device: str) -> None:
        self._on_device = (kind := torch.device(device).type) != "cpu"
        self._is_timed = not self._on_device or kind in _WITH_TIMED_EVENTS
        self._device = device
        self._running: list[tuple[torch.Event, torch.Event]] = []
        self._spent = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a forward pass."""
        if not self._is_timed:
            yield
            return
        if not self._on_device:
            begin = time.perf_counter()
            yield
            self._spent += time.perf_counter() - begin
            return
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._running.append((start, end))

    def seconds(self) -> float | None:
        """After the step, for which the host has waited: those of its passes; None if one has not ended or is not timed."""
        if not self._is_timed or not all(end.query() for _, end in self._running):
            return None
        return self._spent + sum(start.elapsed_time(end) for start, end in self._running) / 1000
