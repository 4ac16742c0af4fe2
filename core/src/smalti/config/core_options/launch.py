"""Options of the launch: ranks, nodes, devices and compilation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from smalti.config.core_options.values import Place
from smalti.config.options import Options, Translation, option
from smalti.errors import Problem

ONLY_ON_CUDA = ("efficient", "cudnn")
"""Values of sdpa_backend that are nothing on the CPU."""
_NODES = re.compile(r"\d+(:\d+)?")
_MOST_NODES = 65_536
_RESTARTS = 3
"""How often a group of a range of nodes starts again by default."""
_WITH_CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Values of dynamo_mode that replay CUDA graphs, each with the nearest one that does not."""


def _backend_name(value: object) -> object:
    """Accelerate writes "NO" for none, and names in capitals."""
    if not isinstance(value, str):
        return value
    return None if value.lower() in ("no", "none", "") else value.lower()


def _is_node_range(value: str | None) -> str | None:
    if value is not None and (
        _NODES.fullmatch(value) is None or not 1 <= _bounds(value)[0] <= _bounds(value)[1] <= _MOST_NODES
    ):
        raise ValueError("it must be a number of nodes, or MIN:MAX, such as 4:6")
    return value


def _bounds(value: str) -> tuple[int, int]:
    least, _, most = value.partition(":")
    return int(least), int(most or least)


class LaunchOptions(Options):
    num_processes: int = option(1, help="Total number of ranks, over all nodes.", accelerate="num_processes", ge=1, le=65_536)
    num_machines: int = option(1, help="Number of nodes.", accelerate="num_machines", ge=1)
    machine_rank: int = option(0, help="Index of this node, from 0.", accelerate="machine_rank", ge=0)
    nodes: Annotated[str | None, AfterValidator(_is_node_range)] = option(
        None,
        help="Number of nodes, or MIN:MAX: the run continues on MIN nodes or more when some are lost.",
    )
    max_restarts: int | None = option(
        None,
        help="How often lost ranks or nodes start the group again without a step in between. Default: 3 with MIN:MAX, else 0.",
        ge=0,
    )
    main_process_ip: str | None = option(None, help="Address of node 0.", accelerate="main_process_ip")
    main_process_port: int | None = option(
        None,
        help="Port on node 0. Default: a free port on a single node, else 29500.",
        accelerate="main_process_port",
        ge=1,
        le=65535,
    )
    shared_output_dir: bool = option(
        True,
        help="Whether all nodes see the same files in output_dir. If not, checkpoints need a mirror.",
        level="advanced",
    )
    use_cpu: bool = option(False, help="Train on the CPU even if there is an accelerator.", accelerate="use_cpu")
    accelerate_config: Place = option(
        None,
        help='Accelerate YAML to start from. "none" ignores the default one of the user.',
        aliases=["accelerate_config_file"],
    )
    process_group_timeout: int = option(
        600, help="Seconds that a rank waits for a lost one before it gives up.", level="advanced", ge=1, le=31_536_000
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
    dynamo_backend: Annotated[str | None, BeforeValidator(_backend_name)] = option(
        None,
        help="Compile the model with this torch.compile backend, such as inductor.",
        level="advanced",
        accelerate="dynamo_config.dynamo_backend",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = option(
        None, help="Mode of torch.compile.", level="expert", when="dynamo_backend", accelerate="dynamo_config.dynamo_mode"
    )
    dynamo_recompile_limit: int = option(
        16,
        help="Number of input shapes compiled per block. Other shapes run uncompiled.",
        level="expert",
        when="dynamo_backend",
        ge=1,
    )

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes with which the run may train."""
        return (self.num_machines, self.num_machines) if self.nodes is None else _bounds(self.nodes)

    @property
    def restarts(self) -> int:
        """How often a lost rank or node starts the group of nodes again, without a step in between."""
        if self.max_restarts is not None:
            return self.max_restarts
        return _RESTARTS if self.node_range[0] < self.node_range[1] else 0

    @property
    def elastic(self) -> bool:
        """Whether several nodes start again after a loss."""
        return self.node_range[1] > 1 and (self.restarts > 0 or self.node_range[0] < self.node_range[1])


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


def cuda_graph_problem(options: LaunchOptions, reason: str) -> Problem | None:
    """If what is compiled is to replay CUDA graphs, in a run in which that does not work for this `reason`."""
    mode = options.dynamo_mode
    if options.use_cpu or options.dynamo_backend != "inductor" or mode not in _WITH_CUDA_GRAPHS:
        return None
    message = f"--dynamo_mode={mode} replays CUDA graphs, which does not work {reason}"
    return Problem(message=message, where="dynamo_mode", fix=f"--dynamo_mode={_WITH_CUDA_GRAPHS[mode]}")


def launch_problems(launch: LaunchOptions) -> list[Problem]:
    """What in these numbers cannot be launched."""
    problems = []
    if launch.num_processes % launch.num_machines:
        message = f"num_processes={launch.num_processes} does not divide over num_machines={launch.num_machines}"
        problems.append(Problem(message=message, fix="num_processes counts the ranks of all nodes"))
    least, most = launch.node_range
    if not least <= launch.num_machines <= most:
        message = f"num_machines={launch.num_machines} is not within nodes={launch.nodes}"
        problems.append(Problem(message=message, fix=f"--num_machines={most}: for as many the effective batch is computed"))
    if launch.machine_rank >= max(most, launch.num_machines):
        counted = f"nodes={launch.nodes}" if launch.nodes else f"num_machines={launch.num_machines}"
        message = f"machine_rank={launch.machine_rank} does not exist with {counted}"
        problems.append(Problem(message=message, fix="nodes are counted from 0"))
    if launch.elastic and not launch.shared_output_dir:
        message = "nodes that start again after a loss agree in the run directory, and shared_output_dir is off"
        problems.append(Problem(message=message, fix="a shared output_dir; or --nodes=N and --max_restarts=0"))
    if most > 1 and not launch.main_process_ip:
        problems.append(Problem(message="several nodes need the address of node 0", fix="--main_process_ip=ADDRESS"))
    return problems
