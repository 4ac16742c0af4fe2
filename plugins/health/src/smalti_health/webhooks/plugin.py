"""Sends events of the run to webhooks. Hooks write into a pipe, and nothing on the training thread waits for a receiver.

The main rank sends what concerns the run. A fault or an error is sent by the rank that has it, from its own node. The sender
of the first rank of each node starts as soon as the ranks are connected, those of other ranks with their first event.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from smalti import (
    Checkpoint,
    CommandCollector,
    GpuFault,
    Outcome,
    Problem,
    RankInfo,
    RunInfo,
    RunState,
    StepResult,
    UserError,
    ValidationResult,
    hookimpl,
)

if TYPE_CHECKING:
    from smalti import Config, OptionGroup
    from smalti.rundir import Phase
    from smalti_health.webhooks.delivery.outbox import Event
    from smalti_health.webhooks.delivery.process import SenderProcess
    from smalti_health.webhooks.events import Source

STAGES = ("scanning", "encoding", "building", "compiling")
"""The phases that are reported when they begin. Saves, validations and the loop have events of their own."""
JOB_VARIABLE = "SIMPLETUNER_JOB_ID"
"""SimpleTuner's; whoever starts a run may set it to know its events. Default: the id of the run."""
_log = logging.getLogger(__name__)


class Webhooks:
    """Active on every rank of runs with `--webhook_config`."""

    def __init__(self) -> None:
        self._sender: SenderProcess | None = None
        self._source: Source | None = None
        self._main = self._first = False
        self._stages: list[str] = []
        self._outcome: Outcome | None = None
        self._failed = False
        self._interval = 0.0
        self._next_progress = float("inf")

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_health.webhooks.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        return config.run_checks(_endpoints)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_health.webhooks.commands:webhook", "Try webhooks, and list which events were delivered.")

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti_health.webhooks.options import WebhookOptions

        self.__init__()  # type: ignore[misc]  # a process may run several times
        options = info.config[WebhookOptions]
        if options.webhook_config is None:
            return
        from smalti_health.webhooks.delivery.process import SenderProcess
        from smalti_health.webhooks.delivery.sender import Setup
        from smalti_health.webhooks.endpoints import read, redacted
        from smalti_health.webhooks.events import Source, lost

        problems: list[Problem] = []
        endpoints = read(options.webhook_config, os.environ, problems)
        for problem in problems:  # on this node: the launcher of another node had none
            _log.warning("webhooks: %s", problem)
        if not endpoints:
            return
        world, config = info.world, info.config
        self._main, self._first = world.is_main, world.local_rank == 0
        self._source = Source(
            run=info.directory.absolute().name,
            directory=info.directory,
            job_id=os.environ.get(JOB_VARIABLE) or info.id,
            host=socket.gethostname(),
            node=world.node,
            rank=world.rank,
            mask=lambda text: redacted(str(config.masked(text)), endpoints),
        )
        setup = Setup(
            endpoints=endpoints,
            run=info.directory.absolute(),
            node=world.node,
            nodes=max(1, world.size // world.local_size),
            takes_over=self._first,
            lost=lost(self._source, time.time()),
        )
        self._sender = SenderProcess(setup)
        self._interval = float(options.webhook_reporting_interval) if self._main else 0.0
        if self._first:
            self._sender.start()

    @hookimpl
    def on_phase(self, state: RunState, phase: Phase) -> None:
        if self._source is None or not self._main or phase.name in self._stages or phase.name not in STAGES:
            return
        from smalti_health.webhooks.events import stage

        self._stages.append(phase.name)
        self._send(stage(self._source, state, phase.name, "running", phase.name.capitalize(), str(phase), time.time()))

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        if self._source is None or not self._main:
            return
        from smalti_health.webhooks.events import stage

        self._stages.append("training")
        message = f"{info.family}, {info.strategy}, from step {state.step} to {state.max_steps}"
        self._send(stage(self._source, state, "training", "running", "Training started", message, time.time()))
        self._next_progress = time.monotonic() + self._interval if self._interval else float("inf")

    @hookimpl
    def on_step_end(self, state: RunState, result: StepResult) -> None:
        if time.monotonic() < self._next_progress or self._source is None or self._sender is None:
            return
        from smalti_health.webhooks.events import progress

        self._next_progress = time.monotonic() + self._interval
        self._send(progress(self._source, state, result, time.time()))
        for sentence in self._sender.reports():
            _log.warning("webhook %s", sentence)

    @hookimpl
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        if self._source is not None and self._main:
            from smalti_health.webhooks import events

            self._send(events.checkpoint(self._source, state, checkpoint, time.time()))

    @hookimpl
    def on_checkpoint_failed(self, state: RunState, error: UserError) -> None:
        if self._source is not None and self._main:
            from smalti_health.webhooks import events

            self._send(events.checkpoint_failed(self._source, state, error, time.time()))

    @hookimpl
    def on_validation(self, state: RunState, result: ValidationResult) -> None:
        if self._source is not None and self._main:
            from smalti_health.webhooks import events

            self._send(events.validation(self._source, result, time.time()))

    @hookimpl
    def on_warning(self, state: RunState, message: str, error: Exception) -> None:
        if self._source is not None and self._main:
            from smalti_health.webhooks import events

            self._send(events.warning(self._source, state, message, time.time()))

    @hookimpl
    def on_gpu_fault(self, state: RunState, fault: GpuFault) -> None:
        if self._source is not None:
            from smalti_health.webhooks import events

            self._send(events.gpu_fault(self._source, state, fault, time.time()))

    @hookimpl
    def on_error(self, state: RunState, error: BaseException) -> None:
        self._failed = True
        if self._source is not None and self._is_own(error):
            from smalti_health.webhooks import events

            self._send(events.failure(self._source, state, error, time.time()))

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        self._outcome = outcome

    @hookimpl
    def on_rank_end(self, state: RunState, error: BaseException | None) -> None:
        source, sender = self._source, self._sender
        if source is None or sender is None:
            return
        from smalti_health.webhooks import events

        interrupted = isinstance(error, KeyboardInterrupt)
        if error is not None and not interrupted and not self._failed and self._is_own(error):  # before the loop
            self._send(events.failure(source, state, error, time.time()))
        if self._main:
            key = self._stages[-1] if self._stages else "training"
            self._send(events.run_end(source, state, key, self._outcome if error is None else None, error, time.time()))
        self._source = self._sender = None
        self._next_progress = float("inf")
        counts = sender.finish()
        if lost := [f"{number} {name}" for name, number in counts.items() if number and name != "delivered"]:
            command = f"smalti webhook ls {source.directory}"
            _log.warning("webhooks: %s; %s lists the critical ones, which the next start sends", ", ".join(lost), command)

    def _is_own(self, error: BaseException) -> bool:
        """Whether this rank reports an error. Only the first rank of a node reports what follows from a failure elsewhere."""
        if self._first:
            return True
        from smalti.parallel import LostRankError, RankError, is_connection_error

        return not isinstance(error, LostRankError | RankError) and not is_connection_error(error)

    def _send(self, event: Event) -> None:
        assert self._sender is not None
        self._sender.send(event)


def _endpoints(config: Config) -> list[Problem]:
    """The problems of the endpoints: nothing is resolved or sent."""
    from smalti_health.webhooks.options import WebhookOptions

    value = config[WebhookOptions].webhook_config
    if value is None:
        return []
    from smalti_health.webhooks.endpoints import read

    problems: list[Problem] = []
    read(value, os.environ, problems)
    return problems


plugin = Webhooks()
