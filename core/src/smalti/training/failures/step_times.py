"""How long steps take on this rank."""

from __future__ import annotations

import math
from collections import deque

_KEPT = 200
_ENOUGH = 5


class StepTimes:
    """The durations of the latest steps, in seconds. Written by the loop, read by other threads."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def p95(self) -> float | None:
        """Their 95th percentile; None while there are too few. The first step counts only at the beginning."""
        known = sorted(self._seconds.copy())
        return known[math.ceil(0.95 * len(known)) - 1] if len(known) >= _ENOUGH else None
