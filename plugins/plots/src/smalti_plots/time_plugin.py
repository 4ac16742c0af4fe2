"""Counts what the time of a run is spent on, and shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from smalti import (
    Checkpoint,
    CommandCollector,
    ExitCode,
    Outcome,
    RankInfo,
    RunValue,
    StepResult,
    hookimpl,
)

if TYPE_CHECKING:
    from smalti.rundir import EventWriter, Phase, RunDirectory
    from smalti_plots.goodput import TimeAccount


class GoodputCounter:
    """On the main rank it counts from the event "running" on, and adds the sums to events of steps and states as `time`."""

    def __init__(self) -> None:
        self._events: EventWriter | None = None
        self._account: TimeAccount | None = None

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.below("run").add_deferred("smalti_plots.command:goodput", "Show what the time of a run was spent on.")

    @hookimpl
    def describe_run(self, directory: RunDirectory) -> list[RunValue]:
        from smalti_plots.goodput import read_goodput

        found = read_goodput(directory)
        text = "-" if found is None or found.share is None else f"{found.share:.0%}"
        return [RunValue(name="goodput", text=text, value=None if found is None else found.as_json())]

    @hookimpl
    def on_launch_end(self, directory: RunDirectory, code: ExitCode) -> list[str]:
        from smalti_plots.goodput import read_goodput

        found = None if code is ExitCode.TAKEN_OVER else read_goodput(directory)
        return [] if found is None else [f"{'time':<12} {found}"]

    @hookimpl
    def on_rank_start(self, info: RankInfo) -> None:
        self._events = None if info.writer is None else info.writer.events
        if self._events is not None:
            self._events.extras.append(self._time)

    def _time(self, kind: str, step: int | None, fields: Mapping[str, object]) -> Mapping[str, object]:
        """The sums so far, for events of steps and states. The loop begins with the state "running"."""
        if self._events is not None and kind == "state" and fields.get("state") == "running":
            from smalti.rundir import read_events_backwards
            from smalti_plots.goodput import TimeAccount, before_attempt

            history = read_events_backwards(self._events.path)
            self._account = TimeAccount(before_attempt(history, step or 0, time.time()))
        if self._account is None or kind not in ("state", "step"):
            return {}
        return {"time": self._account.now().as_fields()}

    @hookimpl
    def on_phase(self, phase: Phase) -> None:
        if self._account is not None:
            self._account.enter(phase.name)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        # Plugins are called before the core, which writes the event of the step.
        if self._account is not None:
            self._account.step(result.seconds, result.data_seconds, skipped=result.skipped)

    @hookimpl
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._account is not None:
            self._account.saved(checkpoint.blocked)

    @hookimpl
    def on_train_end(self, outcome: Outcome | None) -> None:
        if self._account is not None and outcome is None:
            self._account.fail()

    @hookimpl
    def on_rank_end(self) -> None:
        if self._events is not None and self._time in self._events.extras:
            self._events.extras.remove(self._time)
        self._events = self._account = None


plugin = GoodputCounter()
