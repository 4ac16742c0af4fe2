"""Where the workers of a launch are placed, and which nodes are avoided for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from smalti import UserError
from smalti_cluster.jobs.nodes_of_job import nodes_with_faults
from smalti_ray.cluster import nodes, what_it_has
from smalti_ray.launch.worker import Worker

_NODE_LABEL = "ray.io/node-id"
_SAY_SECONDS = 30.0
"""How often the wait for resources is told."""
POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of Ray: `least` to `most` workers, each with these GPUs and cores. `name` is that of the run."""

    name: str
    least: int
    most: int
    gpus: int
    cpus: int
    seconds: int
    """How long resources are waited for."""

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    def describe(self, count: int) -> str:
        each = " and ".join(f"{int(amount)} {name}" for name, amount in self.bundle.items())
        return f"{count} worker{'' if count == 1 else 's'} of {each}"


def draining() -> set[str]:
    """The ids of the nodes that Ray is about to take away, as for a preemption."""
    from ray._private.state import state  # the one place where Ray says it to Python

    return set(state.get_draining_nodes())


def nodes_to_avoid(directory: Path) -> dict[str, str]:
    """The ids and hosts of Ray's nodes on which an accelerator has failed in this run, or that its group has excluded."""
    faulty = nodes_with_faults(directory)
    return {each["NodeID"]: each["NodeManagerHostname"] for each in nodes() if _host(each) in faulty}


def _host(node: Mapping[str, Any]) -> str:
    return str(node["NodeManagerHostname"]).partition(".")[0]


@dataclass(kw_only=True)
class Placement:
    """The workers of a run by their number. The first `least` are placed together or not at all; the others as they come.

    `stopped` is asked while it waits, so that a signal ends that. Close it, which gives everything back to Ray.
    """

    needs: Needs
    directory: Path
    stopped: Callable[[], bool]
    workers: dict[int, Any] = field(default_factory=dict)
    _group: PlacementGroup | None = None

    def place(self) -> bool:
        """Wait until the least number of workers has resources. False after a signal.

        Raises UserError, with what the cluster has, if the resources do not come in time.
        """
        needs, avoided = self.needs, self._selector()
        selectors = [avoided] * needs.least if avoided else None
        self._group = placement_group(
            [needs.bundle] * needs.least, strategy="PACK", name=f"smalti-{needs.name}", bundle_label_selector=selectors
        )
        begun, said = time.monotonic(), 0.0
        while not self._group.wait(POLL_SECONDS):
            waited = time.monotonic() - begun
            if self.stopped():
                return False
            if waited > needs.seconds:
                fix = "ask for fewer with --workers, add nodes to the cluster, or wait longer with --wait_seconds"
                raise UserError(f"no place for {needs.describe(needs.least)} in {needs.seconds} s: {what_it_has()}", fix=fix)
            if waited > 1 and (not said or waited - said > _SAY_SECONDS):
                said = waited
                until = f"for {waited:.0f} of {needs.seconds} s; {what_it_has()}"
                click.echo(f"smalti: waiting for {needs.describe(needs.least)}, {until}", err=True)
        for number in range(needs.least):
            self.workers[number] = self._actor(number, **self._reserved(number))
        for number in range(needs.least, needs.most):
            self.replace(number)
        return True

    def replace(self, number: int) -> Any:
        """Ask Ray for a worker of this number, on any node that can be used. It may come much later.

        Ray moves what is reserved for one of the least number from a lost node to the next one that comes: it uses that, unless
        it is on a node that is avoided now. If it comes up on such a node later, replace it once more.
        """
        if (old := self.workers.pop(number, None)) is not None:
            ray.kill(old)
        if number < self.needs.least and not self.avoids(self._node_of_reserved(number)):
            options = self._reserved(number)
        else:
            selector = self._selector()
            options = {"label_selector": selector} if selector else {}
        self.workers[number] = self._actor(number, **options)
        return self.workers[number]

    def avoids(self, node: str) -> bool:
        """Whether no worker may be on the node with this id of Ray's."""
        return node in nodes_to_avoid(self.directory)

    def _reserved(self, number: int) -> dict[str, Any]:
        assert self._group is not None, "it is placed"
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)}

    def _node_of_reserved(self, number: int) -> str:
        """The id of the node that Ray has last said; one that is lost until Ray has found another."""
        return str(placement_group_table(self._group)["bundles_to_node_id"].get(number, ""))

    def _actor(self, number: int, **options: Any) -> Any:
        needs, name = self.needs, f"worker {number} of {self.needs.name}"
        actor = ray.remote(Worker).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, max_concurrency=4, max_restarts=0, **options
        )
        return actor.remote(name)

    def _selector(self) -> dict[str, str]:
        avoided = nodes_to_avoid(self.directory)
        if avoided:
            hosts = ", ".join(sorted(set(avoided.values())))
            click.echo(f"smalti: no worker is placed on {hosts}: an accelerator has failed there in this run", err=True)
        return {_NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else {}

    def close(self) -> None:
        for worker in self.workers.values():
            ray.kill(worker)
        self.workers.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def numbers(workers: Sequence[int]) -> str:
    """These workers in words: "worker 1", "workers 1 and 3"."""
    words = [str(each) for each in sorted(workers)]
    joined = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"worker{'' if len(words) == 1 else 's'} {joined}"
