"""The loss plot at the end of a run."""

from __future__ import annotations

from pathlib import Path

from smalti.hookspecs import hookimpl
from smalti.rundir import RunDirectory
from smalti.types import Outcome, RunInfo, RunState


class Plot:
    """Draws loss.png from the events file when a run ends, however it ends."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        self._directory = info.directory if info.world.is_main else None

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        if self._directory is None:
            return
        events = list(RunDirectory(self._directory).events())
        if not any(event.kind == "step" for event in events):
            return
        from smalti_plots.loss import plot_losses

        plot_losses(events, self._directory / "loss.png", title=self._directory.name)


plugin = Plot()
