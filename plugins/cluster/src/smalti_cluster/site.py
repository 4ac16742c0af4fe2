"""A launch over several nodes, as this one sees it: who takes part, how ranks meet, and who starts again after a loss.

Importing this module imports no torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from smalti import Config, DistributedPlan, InUseError, PreflightError
from smalti.config import SCHEDULER, LaunchOptions
from smalti.launch import (
    DEFAULT_PORT,
    EXTENSION_VARIABLE,
    LaunchPlan,
    LaunchResult,
    LaunchSite,
    Progress,
    Rendezvous,
    StandbyLauncher,
    plan_launch,
)
from smalti.plugins import choose_distributed
from smalti.rundir import RunWriter
from smalti_cluster.agent import FIRST_RANK_VARIABLE
from smalti_cluster.checks.preflight import check_separate_nodes
from smalti_cluster.elastic.excluded import refuse_excluded
from smalti_cluster.elastic.group import Group
from smalti_cluster.elastic.sizes import possible_sizes
from smalti_cluster.limits.drain import stop_on_drain
from smalti_cluster.nodes.network import check_known_address, check_main_address, interface_settings
from smalti_cluster.nodes.node_0 import LaunchOfNode0
from smalti_cluster.nodes.node_watch import TIMEOUT_VARIABLE
from smalti_cluster.nodes.nodes import Nodes, running_group
from smalti_cluster.options import ClusterOptions, is_elastic, node_range


@dataclass(kw_only=True)
class NodesSite(LaunchSite):
    """`nodes` are those of the launch, if there are several that share the run directory. `group` starts ranks again after
    some were lost, if the options allow that. `planned` is the configuration with its precision. `node_0` is the launch there,
    if that node owns the run directory.
    """

    nodes: Nodes | None = None
    group: Group | None = None
    planned: Config | None = None
    node_0: LaunchOfNode0 | None = None

    def open(self) -> None:
        options = self.config[LaunchOptions]
        refuse_excluded(self.directory.path, options.machine_rank)
        if not self.write:
            return
        if node_range(self.config)[1] > 1 and options.shared_output_dir:
            waits = is_elastic(self.config) and running_group(self.directory) is not None
            self.joins = options.machine_rank > 0 or waits
            self.nodes = Nodes(self.directory, self.config, self.plugins, self.kind)
            if self.joins:
                check_known_address(self.config, self.environment)
                try:
                    self.nodes.wait_for_node_0()
                except BaseException:
                    self.nodes.close()  # its thread would go on trying to connect
                    raise
        try:
            self.facts["network"] = check_main_address(self.config, self.environment)
        except PreflightError:
            if self.nodes is not None and not self.joins:
                self.nodes.refuse_second()  # then its address is that of the other one
            raise

    def plan(self, config: Config, distributed: DistributedPlan) -> LaunchPlan:
        plan, self.planned = self._planned(config, distributed), config
        cluster = config[ClusterOptions]
        if plan.launcher != "in-process" and (is_elastic(config) or cluster.restarts):
            self.group = Group(
                config,
                possible_sizes(config, self.plugins),
                self.directory,
                lambda other: self._planned(other, choose_distributed(other, self.plugins)),
                lambda: LaunchSite.begin(self, config),
            )
            self.notices = self.group.notices
        return plan

    def _planned(self, config: Config, distributed: DistributedPlan) -> LaunchPlan:
        rendezvous = rendezvous_of(config, self.environment)
        return plan_launch(config, distributed, self.directory.path, self.kind, self.environment, rendezvous)

    def begin(self, config: Config) -> RunWriter:
        try:
            writer = super().begin(config)
        except InUseError:
            if self.nodes is not None and not self.joins:
                self.nodes.refuse_second()
            raise
        if self.nodes is not None:
            assert writer.record.started is not None, "the attempt has just begun"
            self.nodes.begin(writer.record.started)
        return writer

    def checked(self, progress: Progress) -> Progress:
        return progress if self.nodes is None else self.nodes.checked(progress)

    def gather(self) -> None:
        events = None if self.writer is None else self.writer.events
        if self.nodes is not None:
            self.nodes.join() if self.writer is None else self.nodes.gather(events)
            self.nodes.close()
        check_separate_nodes(self.directory.path, self.planned or self.config, self.plugins, self.kind, events)

    def run(self, config: Config, plan: LaunchPlan, standby: StandbyLauncher | None) -> LaunchResult:
        with stop_on_drain(config):
            if self.group is not None:
                nodes = self.nodes
                alone = ((config[LaunchOptions].machine_rank,), None, False)
                members, attempt, late = alone if nodes is None else (nodes.members, nodes.attempt, nodes.late)
                self.group.writer = self.writer
                try:
                    return self.group.run(members, attempt, standby, late=late)
                finally:
                    self.writer = self.group.writer
            launch = config[LaunchOptions]
            if node_range(config)[1] > 1 and launch.machine_rank == 0:
                check_port(launch.main_process_port or DEFAULT_PORT)
            if node_range(config)[1] > 1 and self.writer is None:
                self.node_0 = LaunchOfNode0(self.directory)
            return super().run(config, plan, standby)

    def ended_elsewhere(self) -> LaunchResult | None:
        return None if self.node_0 is None else self.node_0.stopped_early()

    def close(self) -> None:
        if self.nodes is not None:
            self.nodes.close()

    @property
    def _scheduled(self) -> bool:
        """Whether a scheduler says which node this is."""
        return self.config.source("machine_rank").startswith(SCHEDULER)

    def flags(self) -> str:
        rank = self.config[LaunchOptions].machine_rank
        return f" --machine_rank={rank}" if rank and not self._scheduled else ""

    def to_resume(self, command: str) -> str:
        if self._scheduled:
            return f"start the same job again; its command on each node can be {command}"
        where = " on this node" if self.config[LaunchOptions].num_machines > 1 else ""
        return f"run the same command again, or{where} {command}"


def rendezvous_of(config: Config, environment: Mapping[str, str]) -> Rendezvous | None:
    """How the ranks of this node meet those of the others; None where this node is all of the launch."""
    launch, cluster = config[LaunchOptions], config[ClusterOptions]
    if launch.num_machines == 1 and not is_elastic(config):
        return None
    timeout = f"timeout={cluster.rendezvous_timeout}"
    node_0 = (f"--master-addr={launch.main_process_ip}", f"--master-port={launch.main_process_port or DEFAULT_PORT}")
    first = launch.machine_rank * (launch.num_processes // launch.num_machines)
    return Rendezvous(
        # A group of one node meets as its `Place` says.
        torch=(f"--node-rank={launch.machine_rank}", *node_0, f"--rdzv-conf={timeout}") if launch.num_machines > 1 else (),
        accelerate=("--rdzv_conf", timeout),
        environment={**interface_settings(config, environment), TIMEOUT_VARIABLE: str(cluster.node_timeout)},
        variables={EXTENSION_VARIABLE: "smalti_cluster.agent:extend", FIRST_RANK_VARIABLE: str(first)},
    )


def check_port(port: int) -> None:
    """Raises PreflightError if node 0 cannot listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"port {port} of this node cannot be used: {error.strerror}"
            raise PreflightError(message, fix="--main_process_port=ANOTHER, the same on all nodes") from error
