"""The events of a run, written by rank 0: what happened in the loop, and the answers to requests."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from smalti.errors import ExitCode, GpuFaultError, UserError
from smalti.hookspecs import hookimpl
from smalti.types import Checkpoint, EvaluationResult, Outcome, RunInfo, RunState, StepResult, StopReason, ValidationResult

if TYPE_CHECKING:
    from smalti.rundir import Condition, EventKind, Request, RunWriter

CHECK_SECONDS = 0.25
"""How often the folder of requests is checked. A check costs a system call, on shared storage a round trip."""

_REASONS = {"interrupted": StopReason.INTERRUPTED, "preempted": StopReason.PREEMPTED, "lost data": StopReason.ERROR_BUDGET}


class Events:
    """Writes what the loop reports as events of the run directory, and answers requests, from the loop's start to its end.

    On the main rank, which has the `writer`; on other ranks every hook returns at once.
    """

    def __init__(self, writer: RunWriter | None = None) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self._checked_at = 0.0
        self._generates_images = False
        self._interval = 1

    def _append(self, kind: EventKind, step: int, **fields: object) -> None:
        if self._writer is not None:
            self._writer.events.append(kind, step=step, **fields)

    @hookimpl(tryfirst=True)  # so that events of other plugins can be written
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        """Write what trains and for how many steps. From here on, the configuration of the launch is that of the run."""
        from smalti.config import TrackingOptions

        self._writer, self._error = info.writer, None
        if (writer := info.writer) is None:
            return
        writer.answer_requests = partial(self._answer, writer, state)
        self.stop_when_taken_over(writer, state)
        self._generates_images = "validation" in info.periodic
        self._interval = info.config[TrackingOptions].log_interval
        writer.take_launch_files()
        self._append(
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
        )

    @staticmethod
    def stop_when_taken_over(writer: RunWriter, state: RunState) -> None:
        """Request a stop without a save as soon as another launch is found to own the run directory."""
        ownership = writer.ownership
        ownership.on_lost = lambda: state.request_stop(StopReason.TAKEN_OVER, ownership.message)
        if ownership.lost:
            ownership.on_lost()

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if self._writer is None:
            return
        if result.step % self._interval == 0 or result.skipped or result.step == state.max_steps:
            self.write_step(state, result)
        if (since := time.monotonic() - self._checked_at) > CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._answer(self._writer, state, since)

    def write_step(self, state: RunState, result: StepResult) -> None:
        """Write a step, without values that are None. `max_steps` is in every line: the last one is enough to show progress."""
        known = {name: value for name, value in asdict(result).items() if value is not None}
        self._append("step", max_steps=state.max_steps, epoch=state.epoch, **known)

    @hookimpl
    def on_validation(self, result: ValidationResult) -> None:
        """Write the generated images, by their paths in the run directory."""
        from smalti.rundir import overview

        if self._writer is None:
            return
        inside = self._writer.directory.relative
        images = [
            {"prompt": image.prompt, "seed": image.seed, "path": inside(image.path)}
            | ({} if image.base is None else {"base": inside(image.base)})
            for image in result.images
        ]
        self._append("sample", step=result.step, overview=inside(overview(result.folder)), images=images)

    @hookimpl
    def on_evaluation(self, result: EvaluationResult) -> None:
        """Write the loss on held-out images: the mean, and by timestep."""
        self._append("eval", **asdict(result))

    @hookimpl
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._writer is None:
            return
        self._append("checkpoint", **asdict(checkpoint) | {"path": self._writer.directory.relative(checkpoint.path)})

    @hookimpl
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        self._append("warning", step=state.step, message=str(error))

    @hookimpl
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        """Write a failure that does not end the run; with the traceback, unless it is a UserError or OSError."""
        known = isinstance(error, UserError | OSError)
        trace = {} if known else {"traceback": "".join(traceback.format_exception(error))}
        self._append("warning", step=state.step, message=message, **trace)

    @hookimpl
    def on_error(self, state: RunState, error: BaseException) -> None:
        """Write an exception that ends the loop, with its traceback."""
        self._error = error
        trace = "".join(traceback.format_exception(error))
        self._append("error", step=state.step, error=type(error).__name__, message=str(error), traceback=trace)

    @hookimpl(trylast=True)
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        """Write the last event. `outcome` is None if an exception ended the loop. No event may follow."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if outcome is not None:
            writer.end(state.step, _condition(outcome.reason), outcome.message, outcome.exit_code)
            return
        message = f"{type(self._error).__name__}: {self._error}" if self._error else "an exception ended it"
        code = self._error.exit_code if isinstance(self._error, UserError | GpuFaultError) else ExitCode.FAILED
        writer.end(state.step, "failed", message, code)

    def _answer(self, writer: RunWriter, state: RunState, since: float = CHECK_SECONDS) -> None:
        for request in writer.take_requests():
            self._handle(writer, state, request, since)

    def _handle(self, writer: RunWriter, state: RunState, request: Request, since: float) -> None:
        """Answer a request that came within the last `since` seconds."""
        if request.kind == "stop":
            reason = _REASONS.get(str(request.details.get("reason")), StopReason.REQUESTED)
            if reason is StopReason.REQUESTED is state.stop_reason:
                state.stop_message = ""  # whatever a plugin has asked for: this is a stop and nothing else
            # It came since the last look; clocks of nodes may differ.
            sent = time.monotonic() - min(max(time.time() - request.sent, 0.0), since)
            state.request_stop(reason, str(request.details.get("message", "")), since=sent)
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


def _condition(reason: StopReason) -> Condition:
    stopped = (StopReason.REQUESTED, StopReason.PREEMPTED, StopReason.INTERRUPTED, StopReason.UNSAVED)
    return "finished" if reason is StopReason.COMPLETED else "stopped" if reason in stopped else "failed"


plugin = Events()
