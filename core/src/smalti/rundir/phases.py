"""The phase of a run (scanning, encoding, building, training ...) and its progress.

Importing this module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

PhaseName = Literal[
    "scanning", "launching", "encoding", "building", "compiling", "training", "validating", "evaluating", "saving"
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
    """The current phase of a process. Changing it is cheap: `current` is polled by the thread that reports it."""

    def __init__(self) -> None:
        self.current: Phase | None = None

    def enter(self, name: PhaseName, *, total: int | None = None, unit: str = "") -> None:
        self.current = Phase(name=name, begun=time.time(), done=None if total is None else 0, total=total, unit=unit)

    def advance(self, done: int, total: int | None = None) -> None:
        """Set the progress of the phase, and `total` if it was not known before."""
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
            self.current = before
