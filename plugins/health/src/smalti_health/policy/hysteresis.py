"""Conditions over time: how long one has held, and in what share of a window."""

from __future__ import annotations

from collections import deque


class Held:
    """How long a condition has held without a break, and in how many readings. A reading without a value is no break."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.seconds = 0.0
        self.count = 0

    def update(self, time: float, condition: bool | None) -> None:
        if condition is None:
            return
        if not condition:
            self._since, self.seconds, self.count = None, 0.0, 0
            return
        if self._since is None:
            self._since = time
        self.seconds, self.count = time - self._since, self.count + 1

    def for_(self, seconds: float, *, readings: int = 3) -> bool:
        """Whether it has held for at least this time, in at least this number of readings."""
        return self.count >= readings and self.seconds >= seconds


class Share:
    """In what share of the readings of the last `window` seconds a condition held, and the mean of a number meanwhile."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[tuple[float, bool, float | None]] = deque()
        self._true = 0
        self._sum, self._numbers = 0.0, 0

    def update(self, time: float, condition: bool, number: float | None) -> None:
        """`number` counts only where the condition holds."""
        number = number if condition else None
        self._samples.append((time, condition, number))
        self._count(condition, number, 1)
        while self._samples[0][0] < time - self._window:
            self._count(*self._samples.popleft()[1:], -1)

    def _count(self, condition: bool, number: float | None, sign: int) -> None:
        self._true += sign * condition
        if number is not None:
            self._sum += sign * number
            self._numbers += sign

    @property
    def full(self) -> bool:
        """Whether the readings cover nearly the whole window; at least ten."""
        return len(self._samples) >= 10 and self._samples[-1][0] - self._samples[0][0] >= 0.9 * self._window

    @property
    def share(self) -> float:
        return self._true / max(len(self._samples), 1)

    @property
    def mean(self) -> float | None:
        return self._sum / self._numbers if self._numbers else None
