"""The loss plot at the end of a run, and the contact sheet of each validation."""

from __future__ import annotations

from pathlib import Path

from smalti import Outcome, RunInfo, RunState, StopReason, ValidationResult, hookimpl


class Plots:
    """Writes loss.png from the events file when a run ends, however it ends, and a contact sheet of each validation."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        self._directory = info.directory if info.world.is_main else None

    @hookimpl
    def on_validation(self, result: ValidationResult) -> None:
        if self._directory is None:
            return
        # Plugins are called before the core, which names the sheet if there is one.
        from smalti.rundir import CONTACT_SHEET
        from smalti_plots.grid import image_grid

        images = sorted(result.images, key=lambda image: image.base is None)  # pairs first, so that none is split by a row
        paths, captions = list[Path](), list[str]()
        for image in images:
            if image.base is not None:
                paths.append(image.base)
                captions.append("before training")
            paths.append(image.path)
            captions.append(image.prompt)
        pairs = len(paths) > len(images)
        image_grid(paths, captions, result.folder / CONTACT_SHEET, together=2 if pairs else 1)

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        if self._directory is None or state.stop_reason is StopReason.TAKEN_OVER:
            return
        from smalti.rundir import RunDirectory

        directory = RunDirectory(self._directory)
        events = list(directory.events())
        if not any(event.kind == "step" for event in events):
            return
        from smalti_plots.loss import plot_losses

        plot_losses(events, directory.loss_plot, title=self._directory.name)


plugin = Plots()
