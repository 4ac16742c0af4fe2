"""The options of trackers, and which trackers they choose. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from pydantic import BeforeValidator

from smalti import Names, OptionGroup, Options, option

KNOWN = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
ALL = "all"
"""Every known tracker whose package is installed."""


def _without_none(value: object) -> object:
    """A list of names without "none", which stands for an empty list in other trainers."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) and not value.startswith("[") else value
    if not isinstance(names, list | tuple):
        return value
    return [name for name in names if not isinstance(name, str) or name.lower() not in ("none", "null")]


class TrackerOptions(Options):
    report_to: Annotated[Names, BeforeValidator(_without_none)] = option(
        (), help="Trackers in addition to events.jsonl: tensorboard, wandb and others that Accelerate supports, or all."
    )
    tracker_project_name: str = option("smalti", help="Project of the run in the trackers.", level="advanced")


def tracker_names(options: TrackerOptions) -> list[str]:
    """The trackers to start, each once."""
    every = [name for name in KNOWN if find_spec(name) is not None] if ALL in options.report_to else []
    return list(dict.fromkeys([*every, *(name for name in options.report_to if name != ALL)]))


GROUP = OptionGroup(name="trackers", title="Trackers", options=TrackerOptions)
