"""Smoothed loss and speed of a run: the same on the console, in `smalti run ls` and in `smalti run watch`.

The loss and the duration of single steps vary too much to be read. Also when other long work is reported. Importing this
module imports no torch.
"""

from __future__ import annotations

import math
import time

LOSS_KEPT = 0.95
"""Weight of a step relative to the next one: a mean over about the last 20 steps."""


class Throughput:
    """The recent speed of a run: the weight of older time halves every `half_life` seconds.

    The first step includes compilation and warm-up, so it counts only until the second one.
    """

    def __init__(self, half_life: float = 30.0) -> None:
        self._half_life = half_life
        self._updates = 0
        self._seconds = self._samples = 0.0

    def update(self, *, seconds: float, samples: float) -> None:
        """Add a step."""
        self._updates += 1
        keep = 0.0 if self._updates == 2 else 0.5 ** (seconds / self._half_life)
        self._seconds = self._seconds * keep + seconds
        self._samples = self._samples * keep + samples

    @property
    def samples_per_second(self) -> float | None:
        """None before the first step."""
        return self._samples / self._seconds if self._seconds > 0 else None


class SmoothedMetrics:
    """Smoothed loss and speed of the recent steps."""

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._sum = self._weight = 0.0
        self._updated = time.monotonic()

    def update(self, loss: float, samples: int) -> tuple[float, float | None]:
        """Add a step. Returns the loss and the samples per second to display.

        A loss that is not finite is returned as it is and does not affect later values.
        """
        now = time.monotonic()
        self._throughput.update(seconds=now - self._updated, samples=samples)
        self._updated = now
        if not math.isfinite(loss):
            return loss, self._throughput.samples_per_second
        self._sum = self._sum * LOSS_KEPT + loss
        self._weight = self._weight * LOSS_KEPT + 1
        return self._sum / self._weight, self._throughput.samples_per_second


def seconds_for(steps: int, samples: float, samples_per_second: float | None) -> float | None:
    """How long `steps` with `samples` each will take; None if the speed is unknown."""
    return steps * samples / samples_per_second if samples_per_second else None


class ReportTimer:
    """Says when a report is due: `first` seconds after the start (None: `every`), then every `every` seconds."""

    def __init__(self, every: float = 10.0, *, first: float | None = None) -> None:
        self._every = every
        self._start = time.monotonic()
        self._next = self._start + (every if first is None else first)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def due(self) -> bool:
        """Whether to report now. After True, the next report is due `every` seconds later."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every
        return True

    def left(self, done: int, total: int) -> float:
        """Seconds that the rest takes at the speed so far; `done` is not 0."""
        return self.elapsed / done * (total - done)
