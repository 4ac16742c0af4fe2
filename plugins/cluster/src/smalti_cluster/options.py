"""Options of several nodes, of their restarts, and of the time that a launch has. Importing this module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from smalti import Config, OptionGroup, Options, Problem, Translation, option
from smalti.config import LaunchOptions
from smalti_cluster.schedulers.layer import scheduler_layer

_NODES = re.compile(r"\d+(:\d+)?")
_MOST_NODES = 65_536
_RESTARTS = 3
"""How often a group of a range of nodes starts again by default."""
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


def _is_node_range(value: str | None) -> str | None:
    if value is not None and (
        _NODES.fullmatch(value) is None or not 1 <= _bounds(value)[0] <= _bounds(value)[1] <= _MOST_NODES
    ):
        raise ValueError("it must be a number of nodes, or MIN:MAX, such as 4:6")
    return value


def _bounds(value: str) -> tuple[int, int]:
    least, _, most = value.partition(":")
    return int(least), int(most or least)


def _in_seconds(value: object) -> object:
    """A duration such as "1h30m" in seconds."""
    if not isinstance(value, str):
        return value
    if (found := _DURATION.fullmatch(value.strip().lower())) is None:
        raise ValueError("it is not a time such as 90s, 10m, 1h30m or 2d")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Seconds = Annotated[int | None, BeforeValidator(_in_seconds)]


class ClusterOptions(Options):
    nodes: Annotated[str | None, AfterValidator(_is_node_range)] = option(
        None,
        help="Number of nodes, or MIN:MAX: the run continues on MIN nodes or more when some are lost.",
    )
    max_restarts: int | None = option(
        None,
        help="How often lost ranks or nodes start the group again without a step in between. Default: 3 with MIN:MAX, else 0.",
        ge=0,
    )
    grow_after: Seconds = option(
        None,
        help="With MIN:MAX: start again with nodes that came back once the group has trained this long. Default: never.",
        level="advanced",
        ge=1,
    )
    rendezvous_timeout: int = option(
        600,
        help="Seconds that nodes wait for each other at the start.",
        level="advanced",
        ge=1,
        le=31_536_000,
    )
    preflight: Literal["auto", "full", "off"] = option(
        "auto",
        help="Check several nodes against each other at the start. `full` measures their network and devices too.",
        level="advanced",
    )
    node_timeout: int = option(
        20,
        help="Seconds without a sign of life after which a node of several counts as lost. 0 disables it.",
        level="advanced",
        ge=0,
        le=86_400,
    )
    time_limit: Seconds = option(
        None, help="Time that this launch may take, as in 24h or 90m. Default: what SLURM says of its job.", ge=1
    )
    stop_before: Seconds = option(
        None,
        help="Save and stop this long before the time limit, as in 5m. The checkpoint is complete by then.",
        ge=0,
    )
    grace_seconds: int | None = option(
        None,
        help="Seconds between the signal of a scheduler and the kill. A save that would take longer is not begun.",
        level="advanced",
        ge=0,
    )
    stop_on_drain: bool = option(
        True, help="Under SLURM, save and stop (exit code 6) when this node is drained or fails.", level="advanced"
    )

    @property
    def restarts(self) -> int:
        """How often a lost rank or node starts the group of nodes again, without a step in between."""
        if self.max_restarts is not None:
            return self.max_restarts
        return _RESTARTS if self.nodes is not None and len(set(_bounds(self.nodes))) > 1 else 0


def node_range(config: Config) -> tuple[int, int]:
    """The least and the most nodes with which the run may train."""
    machines, nodes = config[LaunchOptions].num_machines, config[ClusterOptions].nodes
    return (machines, machines) if nodes is None else _bounds(nodes)


def is_elastic(config: Config) -> bool:
    """Whether several nodes start again after a loss."""
    least, most = node_range(config)
    return most > 1 and (config[ClusterOptions].restarts > 0 or least < most)


def machines_of_nodes(given: Mapping[str, object]) -> Translation:
    """`num_machines` where only `nodes` is given: the most of them."""
    nodes = given.get("nodes")
    if "num_machines" in given or not isinstance(nodes, str | int):
        return Translation()
    try:
        _is_node_range(str(nodes))
    except ValueError:
        return Translation()  # the option itself is refused
    return Translation(values={"num_machines": ("MAX", _bounds(str(nodes))[1])})


def node_problems(config: Config) -> list[Problem]:
    """What in the numbers of nodes cannot be launched."""
    launch, nodes = config[LaunchOptions], config[ClusterOptions].nodes
    problems = []
    least, most = node_range(config)
    if not least <= launch.num_machines <= most:
        message = f"num_machines={launch.num_machines} is not within nodes={nodes}"
        problems.append(Problem(message=message, fix=f"--num_machines={most}: for as many the effective batch is computed"))
    if launch.machine_rank >= max(most, launch.num_machines):
        counted = f"nodes={nodes}" if nodes else f"num_machines={launch.num_machines}"
        message = f"machine_rank={launch.machine_rank} does not exist with {counted}"
        problems.append(Problem(message=message, fix="nodes are counted from 0"))
    if is_elastic(config) and not launch.shared_output_dir:
        message = "nodes that start again after a loss agree in the run directory, and shared_output_dir is off"
        problems.append(Problem(message=message, fix="a shared output_dir; or --nodes=N and --max_restarts=0"))
    if config[ClusterOptions].grow_after is not None and least == most:
        problems.append(Problem(message="grow_after is for a range of nodes", fix="--nodes=MIN:MAX, as in 4:6"))
    if most > 1 and not launch.main_process_ip:
        problems.append(Problem(message="several nodes need the address of node 0", fix="--main_process_ip=ADDRESS"))
    return problems


GROUP = OptionGroup(
    name="cluster",
    title="Nodes and time limits",
    options=ClusterOptions,
    derived=machines_of_nodes,
    scheduler=scheduler_layer,
)
