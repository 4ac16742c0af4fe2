"""How a run does of late, in two numbers: the same on the console, in `smalti run ls` and in `smalti run watch`.

The loss of single steps and the time that they take vary too much to be read. Importing this module imports no torch.
"""

from __future__ import annotations

import math
import time

LOSS_KEPT = 0.95
"""The mean over about the last 20 steps: each step weighs so much less than the next one."""


class Throughput:
    """The speed of a run in the recent past: older time counts half as much after every `half_life` seconds.

    The first step also pays for compilation and warm-up, so it counts only until there is a second one.
    """

    def __init__(self, half_life: float = 30.0) -> None:
        self._half_life = half_life
        self._updates = 0
        self._seconds = self._samples = 0.0

    def update(self, *, seconds: float, samples: float) -> None:
        """A step with so many samples took so many seconds."""
        self._updates += 1
        keep = 0.0 if self._updates == 2 else 0.5 ** (seconds / self._half_life)
        self._seconds = self._seconds * keep + seconds
        self._samples = self._samples * keep + samples

    @property
    def samples_per_second(self) -> float | None:
        """None before the first step."""
        return self._samples / self._seconds if self._seconds > 0 else None


class SmoothedMetrics:
    """Loss and speed of the steps so far, the latest first of all."""

    def __init__(self) -> None:
        self._rate = Throughput()
        self._sum = self._weight = 0.0
        self._updated = time.monotonic()

    def update(self, loss: float, samples: int) -> tuple[float, float | None]:
        """A step has ended; the loss and the samples a second to show.

        A loss that is not finite is shown as it is, so that it is not smoothed away, and leaves no trace.
        """
        now = time.monotonic()
        self._rate.update(seconds=now - self._updated, samples=samples)
        self._updated = now
        if not math.isfinite(loss):
            return loss, self._rate.samples_per_second
        self._sum = self._sum * LOSS_KEPT + loss
        self._weight = self._weight * LOSS_KEPT + 1
        return self._sum / self._weight, self._rate.samples_per_second


def seconds_for(steps: int, samples: float, samples_per_second: float | None) -> float | None:
    """How long so many steps with so many samples each will take; None where the speed is not known."""
    return steps * samples / samples_per_second if samples_per_second else None
