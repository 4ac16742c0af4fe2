"""Runs over several nodes, elastic restarts, jobs of schedulers, and time limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import Checkpoint, CommandCollector, LaunchEntry, RunInfo, RunState, StepBoundary, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem
    from smalti.rundir import Phase
    from smalti_cluster.elastic.growth import Growth
    from smalti_cluster.limits.time_limit import TimeLimit


class Cluster:
    """Active where its options or the environment ask for it. What watches the time runs on the main rank."""

    def __init__(self) -> None:
        self._limit: TimeLimit | None = None
        self._growth: Growth | None = None

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_cluster.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_cluster.options import node_problems

        return config.run_checks(node_problems)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Write the job with which SLURM, Kubernetes or SkyPilot starts a run."
        commands.add_deferred("smalti_cluster.jobs.commands:launch", summary, section="Training")
        summary = "Check several nodes against each other."
        commands.add_deferred("smalti_cluster.checks.command:nodes", summary, section="Node")
        below = commands.below("config")
        summary = "Convert an Accelerate YAML to a configuration file."
        below.add_deferred("smalti_cluster.jobs.accelerate:import_accelerate", summary)
        summary = "Print the Accelerate YAML of a launch on accelerators."
        below.add_deferred("smalti_cluster.jobs.accelerate:export_accelerate", summary)

    @hookimpl
    def configure_launch(self, config: Config) -> LaunchEntry | None:
        from smalti.config import LaunchOptions
        from smalti_cluster.limits.drain import is_watched
        from smalti_cluster.options import ClusterOptions, node_range

        several = node_range(config)[1] > 1 or config[LaunchOptions].machine_rank > 0
        if several or config[ClusterOptions].restarts or is_watched(config):
            return LaunchEntry(name="cluster", title="several nodes", site="smalti_cluster.site:NodesSite")
        return None

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        from smalti_cluster.options import ClusterOptions

        options = info.config[ClusterOptions]
        if info.writer is not None and options.grow_after is not None:
            from smalti_cluster.elastic.growth import Growth

            self._growth = Growth.of_process()
        wanted = (options.time_limit, options.stop_before, options.grace_seconds)
        if info.writer is None or not any(each is not None for each in wanted):
            return
        from smalti_cluster.limits.time_limit import TimeLimit

        self._limit = TimeLimit(info.config, info.writer)

    @hookimpl
    def on_phase(self, phase: Phase) -> None:
        if self._limit is not None:
            self._limit.entered(phase)

    @hookimpl
    def on_step_boundary(self, state: RunState, boundary: StepBoundary) -> None:
        if self._limit is not None:
            self._limit.check(state, boundary)
        if self._growth is not None:
            self._growth.check(state, boundary)

    @hookimpl
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._limit is not None:
            self._limit.saved(checkpoint.seconds)

    @hookimpl
    def on_train_end(self) -> None:
        if self._limit is not None:
            self._limit.close()
        if self._growth is not None:
            self._growth.close()
        self._limit = self._growth = None


plugin = Cluster()
