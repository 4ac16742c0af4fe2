"""Keeps the loss of each training image at each of its visits. Imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from smalti import RunInfo, RunState, StepResult, hookimpl

if TYPE_CHECKING:
    from smalti_validation.visits import VisitFile

_log = logging.getLogger(__name__)


class VisitKeeper:
    """Active where it is installed. On each rank; of the ranks that work on the same samples, one writes."""

    def __init__(self) -> None:
        self._file: VisitFile | None = None

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        from smalti.config import DataOptions, TrainingOptions
        from smalti_validation.visits import FOLDER, Share, VisitFile, truncate

        folder, world = info.directory / FOLDER, info.world
        if world.local_rank == 0:  # before any rank writes; nodes may have directories of their own
            try:
                truncate(folder, state.position)
            except OSError as error:
                _log.warning(
                    "the visits after step %d cannot be removed, so %s may have some twice: %s", state.step, folder, error
                )
        if world.rank % world.context == 0:
            share = Share(
                ranks=world.data_size,
                micro_batch=info.config[DataOptions].train_batch_size,
                accumulation=info.config[TrainingOptions].gradient_accumulation_steps,
            )
            self._file = VisitFile(folder, share, world.data_rank)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._file is None or result.visits is None or result.skipped:
            return
        try:
            self._file.write(result.visits, result.samples)
        except OSError as error:
            _log.warning("from step %d on, the losses of visits are not kept by this rank: %s", result.step, error)
            self.on_train_end()

    @hookimpl
    def on_train_end(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


plugin = VisitKeeper()
