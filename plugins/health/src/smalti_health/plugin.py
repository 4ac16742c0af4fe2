"""Watches the GPUs of a run, stops it when one fails, and keeps the faults that have ended it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from smalti import CommandCollector, FaultAction, Finding, GpuFault, Problem, RankInfo, RunState, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup
    from smalti_health.monitor.rank import Watch

_ACTIONS = {
    "warn": FaultAction.CONTINUE,
    "stop_saved": FaultAction.STOP_SAVED,
    "stop_suspect": FaultAction.STOP_SUSPECT,
    "stop_now": FaultAction.STOP_UNSAVED,
}


class Health:
    """Watches on ranks with a GPU, unless `--gpu_health=off`. Faults are kept in any case: anybody may report one."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._stops = True
        self._info: RankInfo | None = None
        self._closes = False

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_health.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_health.circuits import loop_problems

        return config.run_checks(_metrics, loop_problems)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_health.cli.commands:health", "Health of the GPUs of this node, and of those of runs.")

    @hookimpl
    def on_rank_start(self, state: RunState, info: RankInfo) -> None:
        from smalti_health.options import HealthOptions

        options, world = info.config[HealthOptions], info.world
        state.check_before_step = options.check_before_step
        self._watch, self._stops = None, options.gpu_health == "stop"
        self._info, self._closes = info, world.local_rank == 0
        from smalti_health.monitor.requests import device_request

        request = device_request(world.rank, world.device)
        if options.gpu_health == "off" or request is None:
            return
        from smalti_health.monitor.process import Setup
        from smalti_health.monitor.rank import Watch

        setup = Setup(
            run=info.id,
            node=world.node,
            first=world.rank - world.local_rank,
            port=os.environ.get("MASTER_PORT", ""),
            directory=str(info.directory.absolute()),
            interval=options.gpu_health_interval,
            timeout=options.gpu_health_timeout,
            metrics_port=options.gpu_health_port if world.node == 0 else 0,
            limits=options.limits(),
        )
        self._watch = Watch(setup, request, world.device, state.report_fault, starts=world.local_rank == 0)
        self._watch.start()

    @hookimpl
    def on_step_end(self) -> None:
        """The first step closes the circuit of the node, if a fault has opened it."""
        if self._closes and self._info is not None:
            from smalti_health.circuits import close_circuit

            self._closes = False
            with suppress(OSError):
                close_circuit(self._info.directory, self._info.world.node)

    @hookimpl
    def on_gpu_fault(self, fault: GpuFault) -> FaultAction | None:
        decision = fault.reading.get("decision")
        if decision is None:
            return FaultAction.CONTINUE if fault.kind == "monitor" else None
        return _ACTIONS.get(str(decision)) if self._stops else FaultAction.CONTINUE

    @hookimpl
    def on_fault(self, state: RunState, fault: GpuFault, action: FaultAction) -> None:
        if action >= FaultAction.STOP_SAVED and self._info is not None:
            from smalti_health.circuits import record

            record(self._info, state, fault)

    @hookimpl
    def diagnose(self) -> list[Finding]:
        from smalti_health.cli.findings import gpu_findings

        return gpu_findings()

    @hookimpl
    def on_rank_end(self) -> None:
        watch, self._watch, self._info = self._watch, None, None
        if watch is not None:
            watch.stop()


def _metrics(config: Config) -> Iterator[Problem]:
    from smalti_health.options import HealthOptions

    if config[HealthOptions].gpu_health_port and find_spec("prometheus_client") is None:
        message = "the package prometheus-client is not installed"
        yield Problem(message=message, where="gpu_health_port", fix="pip install prometheus-client, or --gpu_health_port=0")


plugin = Health()
