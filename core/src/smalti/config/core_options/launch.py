"""Options of the launch: ranks, nodes, devices and compilation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from smalti.config.core_options.values import Place
from smalti.config.options import Options, option
from smalti.errors import Problem

ONLY_ON_CUDA = ("efficient", "cudnn")
"""Values of sdpa_backend that are nothing on the CPU."""
_WITH_CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Values of dynamo_mode that replay CUDA graphs, each with the nearest one that does not."""


def _backend_name(value: object) -> object:
    """Accelerate writes "NO" for none, and names in capitals."""
    if not isinstance(value, str):
        return value
    return None if value.lower() in ("no", "none", "") else value.lower()


class LaunchOptions(Options):
    num_processes: int = option(1, help="Total number of ranks, over all nodes.", accelerate="num_processes", ge=1, le=65_536)
    num_machines: int = option(1, help="Number of nodes.", accelerate="num_machines", ge=1)
    machine_rank: int = option(0, help="Index of this node, from 0.", accelerate="machine_rank", ge=0)
    main_process_ip: str | None = option(None, help="Address of node 0.", accelerate="main_process_ip")
    main_process_port: int | None = option(
        None,
        help="Port on node 0. Default: a free port on a single node, else 29500.",
        level="advanced",
        accelerate="main_process_port",
        ge=1,
        le=65535,
    )
    shared_output_dir: bool = option(
        True, help="Whether all nodes see the same files in output_dir. If not, checkpoints need a mirror.", level="advanced"
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
    dynamo_backend: Annotated[str | None, BeforeValidator(_backend_name)] = option(
        None,
        help="Compile the model with this torch.compile backend, such as inductor.",
        level="advanced",
        accelerate="dynamo_config.dynamo_backend",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = option(
        None, help="Mode of torch.compile.", level="expert", when="dynamo_backend", accelerate="dynamo_config.dynamo_mode"
    )


def cuda_graph_problem(options: LaunchOptions, reason: str) -> Problem | None:
    """If what is compiled is to replay CUDA graphs, in a run in which that does not work for this `reason`."""
    mode = options.dynamo_mode
    if options.use_cpu or options.dynamo_backend != "inductor" or mode not in _WITH_CUDA_GRAPHS:
        return None
    message = f"--dynamo_mode={mode} replays CUDA graphs, which does not work {reason}"
    return Problem(message=message, where="dynamo_mode", fix=f"--dynamo_mode={_WITH_CUDA_GRAPHS[mode]}")


def launch_problems(launch: LaunchOptions) -> list[Problem]:
    """What in these numbers cannot be launched."""
    if launch.num_processes % launch.num_machines == 0:
        return []
    message = f"num_processes={launch.num_processes} does not divide over num_machines={launch.num_machines}"
    return [Problem(message=message, fix="num_processes counts the ranks of all nodes")]
