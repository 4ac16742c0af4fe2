"""The options of the planner in a launch: a limit of memory, the forecast, and compiling. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from smalti import OptionGroup, Options, option

if TYPE_CHECKING:
    from smalti import Config


AUTO = "auto"
_LEAST = 10**8
"""Bytes: a smaller limit lacks its unit."""


class PlanOptions(Options):
    fit: str | None = option(
        None,
        help="Choose the fastest way to train within this memory of each accelerator, such as 12GB; auto: what is free. "
        "Options that are set stay as they are; a resume keeps the choice until another --fit is given.",
    )
    fit_host: str = option(
        "auto",
        help="Host memory of each node for what --fit keeps there, such as 64GB; auto: what is free.",
        when="fit",
        level="advanced",
    )
    fit_batch: int | None = option(
        None,
        help="Effective batch that --fit divides over ranks, micro-batches and accumulation. Default: that of other options.",
        when="fit",
        level="advanced",
        ge=1,
    )
    fit_choice: str = option(
        "",
        help="What --fit has chosen, as JSON: smalti sets it, and a resume reads it.",
        when="fit",
        level="expert",
    )
    compile: Literal["off", "auto"] = option(
        "off",
        help="Compile the model. auto: where an equal run with --dynamo_backend=inductor has left its code on this node.",
        level="advanced",
        tradeoff="faster steps without the minutes of a first compilation; results differ by rounding",
    )
    memory_forecast: Literal["auto", "on", "off"] = option(
        "auto",
        help="Warn before a launch if the planner's formulas say that it does not fit into memory. auto: on accelerators.",
        level="advanced",
    )

    @field_validator("fit", "fit_host")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        from smalti.system import parse_bytes

        if value not in (None, AUTO) and parse_bytes(value) < _LEAST:
            raise ValueError("less than any run needs; with its unit: 12GB, 11.5GiB")
        return value


def _completed(config: Config) -> Config:
    from smalti_plan import compiled
    from smalti_plan.limit import completing

    return compiled.completed(completing.completed(config))


GROUP = OptionGroup(name="plan", title="Memory limit and forecast", options=PlanOptions, complete=_completed)
