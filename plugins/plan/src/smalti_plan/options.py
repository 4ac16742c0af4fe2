"""The option of the forecast before a launch."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option


class PlanOptions(Options):
    memory_forecast: Literal["auto", "on", "off"] = option(
        "auto",
        help="Warn before a launch if the planner's formulas say that it does not fit into memory. auto: on accelerators.",
        level="advanced",
    )


GROUP = OptionGroup(name="plan", title="Memory forecast", options=PlanOptions)
