"""Ray's cluster as a launch sees it: what it has, which nodes are to be avoided, and where workers are placed."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from smalti import UserError
from smalti_cluster.jobs.nodes_of_job import nodes_with_faults
from smalti_ray.launch.worker import Worker

_NODE_LABEL = "ray.io/node-id"
_SAY_SECONDS = 30.0
"""How often the wait for resources is told."""
_REACH_SECONDS = 10.0
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


def connect(address: str) -> None:
    """Connect this process to the cluster. Raises UserError if there is none, or one of another version."""
    if address.startswith("ray://"):
        message = f"--address={address} is that of a client, which would end with its connection"
        raise UserError(message, fix="start the launch on a node of the cluster: add --dry-run for the command of Ray Jobs")
    try:
        _reach(address)
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, namespace="smalti")
    except OSError as error:
        fix = "ray start --head on one machine, and --address=ITS_ADDRESS:6379; or --address=local to start one here"
        raise UserError(f"there is no Ray cluster at --address={address}: {_line(error)}", fix=fix) from error
    except (RuntimeError, ValueError) as error:
        fix = "use the same Ray and Python on the cluster and here"
        raise UserError(f"the Ray cluster at --address={address} cannot be used: {_line(error)}", fix=fix) from error


def _reach(address: str) -> None:
    """Raises OSError if nothing listens there: Ray itself would try again without end."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def what_it_has() -> str:
    """The resources of the cluster, and how much of them is free."""
    total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
    nodes = len([each for each in _nodes() if each["Alive"]])
    parts = [f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU")]
    return f"the cluster has {' and '.join(parts)} on {nodes} node{'' if nodes == 1 else 's'}"


def draining() -> set[str]:
    """The ids of the nodes that Ray is about to take away, as for a preemption."""
    from ray._private.state import state  # the one place where Ray says it to Python

    return set(state.get_draining_nodes())


def nodes_to_avoid(directory: Path) -> dict[str, str]:
    """The ids and hosts of Ray's nodes on which an accelerator has failed in this run, or that its group has excluded."""
    faulty = nodes_with_faults(directory)
    return {each["NodeID"]: each["NodeManagerHostname"] for each in _nodes() if _host(each) in faulty}


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


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
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            self.workers[number] = self._actor(number, scheduling_strategy=strategy)
        for number in range(needs.least, needs.most):
            self.replace(number)
        return True

    def replace(self, number: int) -> Any:
        """Ask Ray for a worker of this number, on any node that can be used. It may come much later."""
        if (old := self.workers.pop(number, None)) is not None:
            ray.kill(old)
        selector = self._selector()
        self.workers[number] = self._actor(number, **({"label_selector": selector} if selector else {}))
        return self.workers[number]

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
