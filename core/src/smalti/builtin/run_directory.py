"""The events of a run, written by rank 0: what happened in the loop, and the answers to requests."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from functools import partial

from smalti.config import TrackingOptions, ValidationOptions
from smalti.errors import ExitCode, GpuFaultError, UserError
from smalti.hookspecs import hookimpl
from smalti.rundir import Condition, Phase, Request, RunWriter, TimeAccount, before_attempt, overview, read_events_backwards
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

CHECK_SECONDS = 0.25
"""How often the folder of requests is checked. A check costs a system call, on shared storage a round trip."""

_REASONS = {
    "interrupted": StopReason.INTERRUPTED,
    "preempted": StopReason.PREEMPTED,
    "lost data": StopReason.ERROR_BUDGET,
}


class RunEvents:
    """Writes what the loop reports as events of the run directory."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self.account: TimeAccount | None = None

    def start(self, state: RunState, info: RunInfo) -> None:
        """Write what trains and for how many steps. From here on, the configuration of the launch is that of the run."""
        self._writer.take_launch_files()
        history = read_events_backwards(self._writer.events.path)
        self.account = TimeAccount(before_attempt(history, state.step, time.time()))
        self._writer.events.append(
            "state",
            step=state.step,
            state="running",
            max_steps=state.max_steps,
            family=info.family,
            strategy=info.strategy,
            parameters=info.parameters,
            trainable=info.trainable,
            effective_batch=info.effective_batch,
            plugins=info.plugins,
            time=self.account.now().as_fields(),
        )

    def _time(self) -> dict[str, object]:
        return {} if self.account is None else {"time": self.account.now().as_fields()}

    def step(self, state: RunState, result: StepResult) -> None:
        """Write a step, without values that are None. `max_steps` is in every line: the last one is enough to show progress."""
        known = {name: value for name, value in asdict(result).items() if value is not None}
        self._writer.events.append("step", max_steps=state.max_steps, epoch=state.epoch, **{**known, **self._time()})

    def validation(self, result: ValidationResult) -> None:
        """Write the generated images, by their paths in the run directory."""
        inside = self._writer.directory.relative
        images = [
            {"prompt": image.prompt, "seed": image.seed, "path": inside(image.path)}
            | ({} if image.base is None else {"base": inside(image.base)})
            for image in result.images
        ]
        self._writer.events.append("sample", step=result.step, overview=inside(overview(result.folder)), images=images)

    def evaluation(self, result: EvaluationResult) -> None:
        """Write the loss on held-out images: the mean, and by timestep."""
        fields = {name: value for name, value in asdict(result).items() if name != "step"}
        self._writer.events.append("eval", step=result.step, **fields)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self._writer.events.append(
            "checkpoint",
            step=checkpoint.step,
            path=self._writer.directory.relative(checkpoint.path),
            size=checkpoint.size,
            seconds=checkpoint.seconds,
            blocked=checkpoint.blocked,
        )

    def warning(self, state: RunState, message: str, error: Exception | None = None) -> None:
        """Write a failure that does not end the run; with the traceback, unless it is a UserError or OSError."""
        known = error is None or isinstance(error, UserError | OSError)
        trace = {} if known else {"traceback": "".join(traceback.format_exception(error))}
        self._writer.events.append("warning", step=state.step, message=message, **trace)

    def error(self, state: RunState, error: BaseException) -> None:
        """Write an exception that ends the loop, with its traceback."""
        self._error = error
        trace = "".join(traceback.format_exception(error))
        self._writer.events.append("error", step=state.step, error=type(error).__name__, message=str(error), traceback=trace)

    def end(self, state: RunState, outcome: Outcome | None) -> None:
        """Write the last event. `outcome` is None if an exception ended the loop. No event may follow."""
        if outcome is not None:
            self._writer.end(state.step, _condition(outcome.reason), outcome.message, outcome.exit_code, **self._time())
            return
        if self.account is not None:
            self.account.fail()
        message = f"{type(self._error).__name__}: {self._error}" if self._error else "an exception ended it"
        code = self._error.exit_code if isinstance(self._error, UserError | GpuFaultError) else ExitCode.FAILED
        self._writer.end(state.step, "failed", message, code, **self._time())


def _condition(reason: StopReason) -> Condition:
    if reason is StopReason.COMPLETED:
        return "finished"
    return (
        "stopped"
        if reason in (StopReason.REQUESTED, StopReason.PREEMPTED, StopReason.INTERRUPTED, StopReason.UNSAVED)
        else "failed"
    )


class Events:
    """Writes events and answers requests from the start of the loop to its end."""

    def __init__(self) -> None:
        self._writer: RunWriter | None = None
        self._events: RunEvents | None = None
        self._checked_at = 0.0
        self._generates_images = False
        self._interval = 1

    @hookimpl(tryfirst=True)  # so that events of other plugins can be written
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        if info.writer is None:
            return
        self._writer = info.writer
        info.writer.answer_requests = partial(self._answer, info.writer, state)
        self.stop_when_taken_over(info.writer, state)
        self._generates_images = info.config[ValidationOptions].samples_images
        self._interval = info.config[TrackingOptions].log_interval
        self._events = RunEvents(info.writer)
        self._events.start(state, info)

    @hookimpl
    def on_phase(self, phase: Phase) -> None:
        if self._events is not None and self._events.account is not None:
            self._events.account.enter(phase.name)

    @staticmethod
    def stop_when_taken_over(writer: RunWriter, state: RunState) -> None:
        """Request a stop without a save as soon as another launch is found to own the run directory."""
        ownership = writer.ownership
        ownership.on_lost = lambda: state.request_stop(StopReason.TAKEN_OVER, ownership.message)
        if ownership.lost:
            ownership.on_lost()

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if self._writer is None or self._events is None:
            return
        if self._events.account is not None:
            self._events.account.step(result.seconds, result.data_seconds, skipped=result.skipped)
        if result.step % self._interval == 0 or result.skipped or result.step == state.max_steps:
            self._events.step(state, result)
        if (since := time.monotonic() - self._checked_at) > CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._answer(self._writer, state, since)

    def _answer(self, writer: RunWriter, state: RunState, since: float = CHECK_SECONDS) -> None:
        for request in writer.take_requests():
            self._handle(writer, state, request, since)

    def _handle(self, writer: RunWriter, state: RunState, request: Request, since: float) -> None:
        """Answer a request that came within the last `since` seconds."""
        if request.kind == "stop":
            reason = _REASONS.get(str(request.details.get("reason")), StopReason.REQUESTED)
            # It came since the last look; clocks of nodes may differ.
            age = min(max(time.time() - request.sent, 0.0), since)
            state.request_stop(reason, str(request.details.get("message", "")), since=time.monotonic() - age)
            writer.acknowledge(request, message=f"stopping after step {state.step}, with a checkpoint")
        elif request.kind == "save":
            state.request_save()
            writer.acknowledge(request, message=f"saving after step {state.step}")
        elif self._generates_images:
            state.request_validation()
            writer.acknowledge(request, message=f"generating images after step {state.step}")
        else:
            writer.acknowledge(
                request, accepted=False, message="this run has no validation_prompt and no validation_prompt_library"
            )

    @hookimpl
    def on_validation(self, state: RunState, result: ValidationResult) -> None:
        if self._events is not None:
            self._events.validation(result)

    @hookimpl
    def on_evaluation(self, result: EvaluationResult) -> None:
        if self._events is not None:
            self._events.evaluation(result)

    @hookimpl
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        if self._events is not None:
            if self._events.account is not None:
                self._events.account.saved(checkpoint.blocked)
            self._events.checkpoint(checkpoint)

    @hookimpl
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        if self._events is not None:
            self._events.warning(state, str(error))

    @hookimpl
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        if self._events is not None:
            self._events.warning(state, message, error)

    @hookimpl
    def on_error(self, state: RunState, error: BaseException) -> None:
        if self._events is not None:
            self._events.error(state, error)

    @hookimpl(trylast=True)
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        if self._events is None:
            return
        self._events.end(state, outcome)
        self._writer = self._events = None


plugin = Events()
