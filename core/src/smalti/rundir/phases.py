"""The phase of a run (scanning, encoding, building, training ...) and its progress.

Importing this module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

PhaseName = Literal[
    "scanning", "launching", "encoding", "building", "compiling", "training", "validating", "evaluating", "saving", "paused"
]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase. `begun` is in unix seconds. `done` and `total` count `unit`, and are None if unknown."""

    name: str
    begun: float
    done: int | None = None
    total: int | None = None
    unit: str = ""

    def seconds_remaining(self, now: float) -> float | None:
        """The remaining time at the speed so far; None if unknown."""
        if not self.done or self.total is None or now <= self.begun:
            return None
        return (self.total - self.done) * (now - self.begun) / self.done

    def __str__(self) -> str:
        """As text: "encoding 1,200/50,000 images"."""
        if self.total is None:
            return self.name
        return " ".join(filter(None, [self.name, f"{self.done or 0:,}/{self.total:,}", self.unit]))


class Phases:
    """The current phase of a process. Changing it is cheap: `current` is polled by the thread that reports it.

    `on_enter` is called with each phase that begins, or continues after one within it. `active_at` is the time of the latest
    progress, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.current: Phase | None = None
        self.on_enter: Callable[[Phase], None] | None = None
        self.active_at = time.monotonic()

    def enter(self, name: PhaseName, *, total: int | None = None, unit: str = "") -> None:
        self._set(Phase(name=name, begun=time.time(), done=None if total is None else 0, total=total, unit=unit))

    def note_progress(self) -> None:
        """Note progress that is not counted, such as a step."""
        self.active_at = time.monotonic()

    def _set(self, phase: Phase | None) -> None:
        self.current = phase
        self.note_progress()
        if phase is not None and self.on_enter is not None:
            self.on_enter(phase)

    def advance(self, done: int, total: int | None = None) -> None:
        """Set the progress of the phase, and `total` if it was not known before."""
        self.note_progress()
        if self.current is not None:
            self.current = replace(self.current, done=done, total=self.current.total if total is None else total)

    @contextmanager
    def during(self, name: PhaseName, *, total: int | None = None, unit: str = "") -> Iterator[None]:
        """A phase within another one, which continues afterwards."""
        before = self.current
        self.enter(name, total=total, unit=unit)
        try:
            yield
        finally:
            self._set(before)
