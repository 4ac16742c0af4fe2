"""The events of a run, written by rank 0: what happened in the loop, and answers to what is asked of the run there."""

from __future__ import annotations

import time

from smalti.errors import UserError
from smalti.hookspecs import hookimpl
from smalti.liverun import LiveRun
from smalti.rundir import Request
from smalti.settings import LaunchOptions, TrackingOptions, ValidationOptions
from smalti.types import (
    Checkpoint,
    EvaluationResult,
    Outcome,
    RunInfo,
    RunState,
    StepResult,
    StopReason,
    ValidationResult,
)

LOOK_SECONDS = 0.25
"""How often the folder of requests is looked at: a look costs a system call, on shared storage a round trip."""

_REASONS = {
    "interrupted": StopReason.INTERRUPTED,
    "preempted": StopReason.PREEMPTED,
    "lost data": StopReason.ERROR_BUDGET,
}


class Events:
    """Speaks for the run from the start of the loop to its end."""

    def __init__(self) -> None:
        self._live: LiveRun | None = None
        self._looked = 0.0
        self._draws = False
        self._interval = 1

    @hookimpl(tryfirst=True)  # so that there are events of what others do
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        if info.live is None:
            return
        self._live = info.live
        self._draws = bool(info.config[ValidationOptions].validation_prompt)
        self._interval = info.config[TrackingOptions].log_interval
        self._live.record_start(state, info)
        compiles = info.config[LaunchOptions].dynamo_backend is not None  # in the first step
        self._live.phases.enter("compiling" if compiles else "training")

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if self._live is None:
            return
        if (phase := self._live.phases.current) is not None and phase.name == "compiling":
            self._live.phases.enter("training")
        if result.step % self._interval == 0 or result.skipped or result.step == state.max_steps:
            self._live.record_step(state, result)
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            for request in self._live.take_requests():
                self._obey(self._live, state, request)

    def _obey(self, live: LiveRun, state: RunState, request: Request) -> None:
        if request.kind == "stop":
            reason = _REASONS.get(str(request.details.get("reason")), StopReason.REQUESTED)
            state.request_stop(reason, str(request.details.get("message", "")))
            live.acknowledge(request, message=f"stopping after step {state.step}, with a checkpoint")
        elif request.kind == "save":
            state.request_save()
            live.acknowledge(request, message=f"saving after step {state.step}")
        elif self._draws:
            state.request_validation()
            live.acknowledge(request, message=f"drawing after step {state.step}")
        else:
            live.acknowledge(request, accepted=False, message="this run has no validation_prompt")

    @hookimpl
    def on_validation(self, state: RunState, result: ValidationResult) -> None:
        if self._live is not None:
            self._live.record_validation(result)

    @hookimpl
    def on_evaluation(self, result: EvaluationResult) -> None:
        if self._live is not None:
            self._live.record_evaluation(result)

    @hookimpl
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        if self._live is not None:
            self._live.record_checkpoint(checkpoint)

    @hookimpl
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        if self._live is not None:
            self._live.record_warning(state, str(error))

    @hookimpl
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        if self._live is not None:
            self._live.record_warning(state, message, error)

    @hookimpl
    def on_error(self, state: RunState, error: BaseException) -> None:
        if self._live is not None:
            self._live.record_error(state, error)

    @hookimpl(trylast=True)
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        if self._live is None:
            return
        self._live.record_end(state, outcome)
        self._live = None


plugin = Events()
