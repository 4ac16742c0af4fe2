"""After how long without progress a rank hangs, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_STEP = "first_step"
"""The key of the first step of a launch, in which kernels are chosen and connections made."""
DEFAULTS: Mapping[str, float] = {
    "scanning": 0,
    "encoding": 0,
    "building": 0,
    "compiling": 3600,
    FIRST_STEP: 1800,
    "training": 60,
    "validating": 1800,
    "evaluating": 1800,
    "saving": 3600,
    "paused": 0,
}
"""Seconds without progress; 0 for no deadline, where one item can take any time. That of "training" is for one step."""
STEPS = 5
"""The deadline of a step, as a multiple of the 95th percentile of the latest ones."""


@dataclass(frozen=True)
class Deadlines:
    """`given` replaces defaults, by phase."""

    given: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, phase: str, *, p95: float | None = None) -> float | None:
        """The deadline of a phase; None if it has none. `p95` is that of the latest steps, None before the first."""
        if phase == "training" and p95 is None:
            phase = FIRST_STEP
        seconds = self.given.get(phase, DEFAULTS.get(phase, 0))
        if phase == "training" and phase not in self.given and p95 is not None:
            seconds = max(seconds, STEPS * p95)
        return seconds or None
