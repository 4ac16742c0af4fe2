"""When to report something that takes long."""

from __future__ import annotations

import time


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
