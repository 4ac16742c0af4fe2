"""The options of the watch for hangs. Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from smalti import Names, OptionGroup, Options, option
from smalti.rundir import PhaseName


def _phase_deadlines(pairs: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError for a pair that is not PHASE=SECONDS."""
    known = (*get_args(PhaseName), "first_step")
    for pair in pairs:
        phase, _, seconds = pair.partition("=")
        if phase not in known:
            raise ValueError(f"{phase!r} is not a phase; the phases are {', '.join(known)}")
        if not re.fullmatch(r"\d+(\.\d+)?", seconds):
            raise ValueError(f"{pair!r} is not PHASE=SECONDS")
    return pairs


class HangOptions(Options):
    phase_deadlines: Annotated[Names, AfterValidator(_phase_deadlines)] = option(
        (),
        help="PHASE=SECONDS without progress after which a rank hangs, as in training=300. 0 disables that of a phase.",
        level="advanced",
    )
    on_hang: Literal["warn", "stop"] = option(
        "warn",
        help="What to do when a rank hangs. warn: report it with all stacks; stop: also save from healthy ranks and stop.",
        level="advanced",
    )

    def deadlines(self) -> dict[str, float]:
        """The values of `phase_deadlines`, by phase."""
        pairs = (each.partition("=") for each in self.phase_deadlines)
        return {phase: float(seconds) for phase, _, seconds in pairs}


GROUP = OptionGroup(name="hangs", title="Hangs", options=HangOptions)
