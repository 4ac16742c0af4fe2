"""Runs over several nodes, elastic restarts, jobs of schedulers, and time limits."""

from __future__ import annotations

from smalti import CommandCollector, hookimpl


class Cluster:
    """Active where it is installed; a run of one node without a time limit imports its options alone."""

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        summary = "Write the job with which SLURM or Kubernetes starts a run."
        commands.add_deferred("smalti_cluster.jobs.commands:launch", summary, section="Training")


plugin = Cluster()
