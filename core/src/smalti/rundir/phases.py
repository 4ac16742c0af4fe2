"""What a run is busy with (scanning, encoding, building, training ...), and how far it has come with that.

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
    """One phase. `begun` is in unix seconds; `done` and `total` count `unit`, and are None where they are not known."""

    name: str
    begun: float
    done: int | None = None
    total: int | None = None
    unit: str = ""

    def seconds_remaining(self, now: float) -> float | None:
        """At the speed so far; None where that is not known."""
        if not self.done or self.total is None or now <= self.begun:
            return None
        return (self.total - self.done) * (now - self.begun) / self.done

    def __str__(self) -> str:
        """For people: "encoding 1,200/50,000 images"."""
        if self.total is None:
            return self.name
        return " ".join(filter(None, [self.name, f"{self.done or 0:,}/{self.total:,}", self.unit]))


class Phases:
    """The phase in which a process is. To change it costs nothing: whoever tells of it looks at `current` now and then."""

    def __init__(self) -> None:
        self.current: Phase | None = None

    def enter(self, name: PhaseName, *, total: int | None = None, unit: str = "") -> None:
        self.current = Phase(name=name, begun=time.time(), done=None if total is None else 0, total=total, unit=unit)

    def advance(self, done: int, total: int | None = None) -> None:
        """So much of the phase is done; `total` where only now it is known."""
        if self.current is not None:
            self.current = replace(self.current, done=done, total=self.current.total if total is None else total)

    @contextmanager
    def during(self, name: PhaseName, *, total: int | None = None, unit: str = "") -> Iterator[None]:
        """A phase within another one, which goes on afterwards."""
        before = self.current
        self.enter(name, total=total, unit=unit)
        try:
            yield
        finally:
            self.current = before
