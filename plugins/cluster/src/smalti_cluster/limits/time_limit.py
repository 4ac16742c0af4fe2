"""Stopping in time: before the time limit of the job, and within the time that a scheduler leaves after its signal."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from smalti import Config, RunState, StepBoundary, StopReason, UserError
from smalti.config import CheckpointOptions
from smalti.rundir import Phase, RunWriter
from smalti_cluster.options import ClusterOptions
from smalti_cluster.schedulers.slurm import seconds_left

UNKNOWN_SAVE = 60.0
"""Seconds that a save is expected to take before one was measured."""
_STEPS = 20
_ASK_SECONDS = 300.0
"""How often SLURM is asked for the time left: an administrator can extend a job."""


class TimeLimit:
    """The end of this launch, and how long steps, validations and saves take. On the main rank, which decides for all."""

    def __init__(self, config: Config, writer: RunWriter) -> None:
        options = config[ClusterOptions]
        self._margin, self._grace = options.stop_before, options.grace_seconds
        self._in_background = config[CheckpointOptions].checkpoint_async
        self._end: float | None = None
        self._unknown = False
        self._stopped = False
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._boundary: float | None = None
        self._validation, self._validated = 0.0, 0.0
        self._validates_since: float | None = None
        self._closed = threading.Event()
        last = writer.directory.latest("checkpoint")
        self._save = last.number("seconds") if last is not None else None
        if options.time_limit is not None:
            begun = writer.record.started or time.time()
            self._end = time.monotonic() + options.time_limit - (time.time() - begun)
        elif self._margin is not None and "SLURM_JOB_ID" not in os.environ:
            self._unknown = True
        elif self._margin is not None:
            threading.Thread(target=self._ask_slurm, name="smalti-time-limit", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _ask_slurm(self) -> None:
        while True:
            left = seconds_left(os.environ)
            if left is not None:
                self._end = time.monotonic() + left
            self._unknown = self._end is None
            if self._closed.wait(_ASK_SECONDS):
                return

    # --- measuring --------------------------------------------------------------------------------------------------

    def saved(self, seconds: float) -> None:
        """Note how long a save took."""
        self._save = max(seconds, self._save or 0.0)

    def entered(self, phase: Phase) -> None:
        """Note how long validations and evaluations take."""
        if self._validates_since is not None:
            self._validated += time.monotonic() - self._validates_since
            self._validation = max(self._validation, self._validated)
        self._validates_since = time.monotonic() if phase.name in ("validating", "evaluating") else None

    # --- deciding ---------------------------------------------------------------------------------------------------

    def check(self, state: RunState, boundary: StepBoundary) -> None:
        """Ask all ranks to stop if the next boundary comes too late for a save; without a save if there is no time for it."""
        if boundary.agreed is not StopReason.NONE:
            self._check_save(state)
            return
        now = time.monotonic()
        if self._boundary is not None:
            self._steps.append(now - self._boundary - self._validated)
        self._boundary, self._validated = now, 0.0
        if state.step >= state.max_steps:
            return
        if self._unknown:
            self._unknown, self._margin = False, None
            message = "--stop_before has no effect: the time limit of this launch is unknown"
            boundary.warn(message, UserError(message, fix="--time_limit=24h, or the limit of the job"))
        if state.stop_reason is StopReason.NONE and self._end is not None and self._margin is not None:
            needed, left = self._until_saved(boundary), self._end - now - self._margin
            if needed > left:
                self._stopped = True
                why = f"the next step and a save need {needed:.0f} s, and {max(left, 0):.0f} s are left for them"
                message = f"preempted at step {state.step} of {state.max_steps} by the time limit: {why}"
                state.request_stop(StopReason.PREEMPTED, message)

    def _check_save(self, state: RunState) -> None:
        """Ask for a stop without a save if it would not end in time. Until one was measured it is assumed to end in time."""
        left, limit = self._left(state, time.monotonic())
        if self._save is not None and left is not None and self._save > left:
            why = f"the last save took {self._save:.1f} s, and {max(left, 0):.1f} s are left of {limit}"
            message = f"preempted at step {state.step} of {state.max_steps} without a checkpoint of it: {why}"
            state.request_stop(StopReason.UNSAVED, message)

    def _until_saved(self, boundary: StepBoundary) -> float:
        """Seconds to the end of a save after the next step. An earlier save that is not finished comes first."""
        saves = 2 if self._in_background and (boundary.saves or boundary.saving) else 1
        validation = self._validation if boundary.validates else 0.0
        return validation + max(self._steps, default=0.0) + saves * (self._save or UNKNOWN_SAVE)

    def _left(self, state: RunState, now: float) -> tuple[float | None, str]:
        """Seconds to the end of the process, and what ends it; None if that is unknown."""
        found = []
        if self._end is not None:
            found.append((self._end - now, "the time limit"))
        if self._grace is not None and not self._stopped:
            since = now if state.stop_requested_at is None else state.stop_requested_at
            found.append((since + self._grace - now, f"--grace_seconds={self._grace}"))
        return min(found) if found else (None, "")
