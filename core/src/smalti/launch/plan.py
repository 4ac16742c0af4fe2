"""From a Config to a launch plan: how many processes are started, by which launcher, in which environment.

One rank runs in this process. On CPUs, torch's elastic launcher starts several ranks, as Accelerate starts only one process
there. On accelerators, `accelerate launch` starts them, from the user's YAML with smalti's settings merged in.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal, cast

import psutil

from smalti.config import ONLY_ON_CUDA, PER_MACHINE, Config, LaunchOptions, TrainingOptions, accelerate_yaml
from smalti.errors import PreflightError, UserError
from smalti.parallel import ALLOCATOR_VARIABLES, in_bf16, is_rocm
from smalti.plugins import Plugins
from smalti.rundir import RunDirectory
from smalti.system import atomic_write, usable_cores
from smalti.types import DistributedPlan

Launcher = Literal["in-process", "elastic", "accelerate"]

DEFAULT_PORT = 29500
"""The port on which node 0 listens if no port is given: the default of torch and of Accelerate."""
DIGEST_VARIABLE = "SMALTI_DIGEST"
"""The environment variable with the digest of the configuration for which workers are launched."""
CHOSEN_VARIABLE = "SMALTI_CHOSEN"
"""The environment variable with values for the ranks in place of the configured ones, in JSON: {option: [value, reason]}."""
_LOOPBACK = "127.0.0.1"
_ON_LOOPBACK = ("--rdzv-backend=c10d", f"--rdzv-endpoint={_LOOPBACK}:0", f"--local-addr={_LOOPBACK}")
"""Arguments for torch's launcher on a single node: like --standalone, which however resolves "localhost" and the host name."""
_KINDS = {"cuda": "MULTI_GPU", **{kind: f"MULTI_{kind.upper()}" for kind in ("xpu", "npu", "mlu", "hpu", "musa", "sdaa")}}
"""The `distributed_type` of an Accelerate YAML by the kind of accelerator."""
_ON_ANY = {"FSDP", "DEEPSPEED"}
"""Types that Accelerate launches on any kind of accelerator, but not on CPUs."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to start the workers of this node. Nothing is started yet.

    `environment` has only the variables to set. `secrets` and `variables` are set as well; secrets are never shown or written,
    `variables` are between processes of smalti. `ranks` are those of this node, empty if they are not known before the start.
    """

    launcher: Launcher
    distributed: DistributedPlan
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    accelerate: Mapping[str, object] = field(default_factory=dict)
    accelerate_file: Path | None = None
    ranks: range = range(1)
    notices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "launcher": self.launcher,
            "strategy": self.distributed.title,
            "settings": dict(self.distributed.settings),
            "ranks": list(self.ranks),
            "command": list(self.command),
            "environment": dict(self.environment),
            "accelerate": dict(self.accelerate),
        }


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the ranks of this node find those of others, where a single node is not all of the launch.

    `torch` and `accelerate` are arguments of torch's and of Accelerate's launcher, `environment` and `variables` are added to
    those of the plan.
    """

    torch: tuple[str, ...]
    accelerate: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def expected_kind(config: Config) -> str | None:
    """The kind of accelerator that the user's Accelerate YAML names; None if it names none, or if --use_cpu overrides it.

    "cuda" if the file asks for accelerators without naming their kind.
    """
    if config[LaunchOptions].use_cpu:
        return None
    said = config.accelerate.get("distributed_type")
    return "cuda" if said in _ON_ANY else next((kind for kind, name in _KINDS.items() if name == said), None)


def plan_launch(
    config: Config,
    distributed: DistributedPlan,
    directory: Path,
    kind: str,
    environment: Mapping[str, str] | None = None,
    rendezvous: Rendezvous | None = None,
) -> LaunchPlan:
    """Plan how to start the workers of this node, for a configuration that was checked.

    `kind` is the result of `smalti.parallel.accelerator_kind`. `environment` defaults to that of this process. Without a
    `rendezvous`, the ranks of this node are all ranks. Raises UserError if the user's Accelerate YAML does not fit the node.
    """
    environment = os.environ if environment is None else environment
    options = config[LaunchOptions]
    local = options.num_processes // options.num_machines
    gpus = _chosen_gpus(config, kind, local)
    allocator = allocator_settings(kind, environment)
    if local == 1 and rendezvous is None and not gpus:
        return LaunchPlan(
            launcher="in-process",
            distributed=distributed,
            environment={**allocator, **distributed.environment},
            secrets=config.secrets(),
        )
    if kind not in ("cpu", *_KINDS) and options.num_processes > 1:
        raise UserError(f"{kind} devices support only one process", fix="--num_processes=1, or --use_cpu")
    worker = ("-m", "smalti.launch.worker", str(directory))
    yaml_file = directory / _name_for(options.machine_rank, "accelerate.yaml") if kind != "cpu" else None
    merged = merged_yaml(config, distributed, kind, alone=rendezvous is None) if yaml_file else {}
    if yaml_file:
        meeting = () if rendezvous is None else rendezvous.accelerate
        start = ("accelerate.commands.launch", "--config_file", str(yaml_file), *_ignored_by_accelerate(merged), *meeting)
    else:
        meeting = _ON_LOOPBACK if rendezvous is None else rendezvous.torch
        start = ("torch.distributed.run", f"--nproc-per-node={local}", f"--nnodes={options.num_machines}", *meeting)
    return LaunchPlan(
        launcher="accelerate" if yaml_file else "elastic",
        distributed=distributed,
        command=(sys.executable, "-m", *start, *worker),
        environment={
            **_threads(local, environment),
            **(_loopback(environment) if rendezvous is None else rendezvous.environment),
            **allocator,
            **distributed.environment,
        },
        secrets=config.secrets(),
        variables={} if rendezvous is None else rendezvous.variables,
        accelerate=merged,
        accelerate_file=yaml_file,
        ranks=range(options.machine_rank * local, (options.machine_rank + 1) * local),
        notices=tuple(accelerate_yaml.differences(config.accelerate, merged, config.schema)) if merged else (),
    )


def _threads(local: int, environment: Mapping[str, str]) -> dict[str, str]:
    """An equal share of the cores of this node for each rank, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // local))}


def allocator_settings(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator settings of torch for devices of this kind, unless the user has set any.

    Images of many sizes fragment memory; expandable segments avoid most of it. CUDA under Windows, WSL and on Jetson devices
    does not support them, and torch for ROCm warns that it does not.
    """
    lacking = platform.system() != "Linux" or "microsoft" in platform.release() or Path("/etc/nv_tegra_release").exists()
    if kind != "cuda" or lacking or is_rocm() or any(name in environment for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def _loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """The interface through which gloo connects the ranks of a single node, unless the user has set one.

    By default gloo resolves the host name, which may have no address in containers, or wait for name servers. NCCL reads
    addresses from the interfaces and needs no names.
    """
    if "GLOO_SOCKET_IFNAME" in environment:
        return {}
    interfaces = [
        name for name, addresses in psutil.net_if_addrs().items() if _LOOPBACK in {each.address for each in addresses}
    ]
    return {"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {}


def _chosen_gpus(config: Config, kind: str, local: int) -> list[str]:
    """The accelerators that the user's Accelerate YAML selects; empty for all of them."""
    given = str(config.accelerate.get("gpu_ids") or "all")
    if kind == "cpu" or given == "all":
        return []
    chosen = [each.strip() for each in given.split(",")]
    if len(chosen) < local:
        raise UserError(
            f"gpu_ids in the Accelerate YAML lists {len(chosen)} devices ({given}) for {local} processes on this node",
            fix=f"gpu_ids: all, or list {local} devices; or --num_processes={len(chosen) * config[LaunchOptions].num_machines}",
        )
    return chosen


def _ignored_by_accelerate(merged: Mapping[str, object]) -> tuple[str, ...]:
    """Flags for the keys that `accelerate launch` accepts in its YAML and then does not read (1.12 to 1.15 at least)."""
    backend = str(merged.get("rdzv_backend") or "static")
    flags = () if backend == "static" else ("--rdzv_backend", backend)
    return (*flags, "--enable_cpu_affinity") if merged.get("enable_cpu_affinity") else flags


def merged_yaml(config: Config, distributed: DistributedPlan, kind: str, *, alone: bool = True) -> dict[str, object]:
    """The user's Accelerate YAML with the launch settings of smalti and then of the strategy merged in. The rest is unchanged.

    A rank that is not `alone` meets others, even if it is a single one now.

    A port of 0 lets Accelerate choose a free one, which works only on a single node.
    """
    options = config[LaunchOptions]
    ours: dict[str, object] = {
        "distributed_type": _KINDS[kind] if options.num_processes > 1 or not alone else "NO",
        "num_processes": options.num_processes,
        "num_machines": options.num_machines,
        "machine_rank": options.machine_rank,
        "main_process_port": options.main_process_port or (DEFAULT_PORT if options.num_machines > 1 else 0),
        "mixed_precision": "bf16" if in_bf16(config, kind) else "no",
        "use_cpu": False,
    }
    if options.main_process_ip is not None:
        ours["main_process_ip"] = options.main_process_ip
    # smalti compiles block by block itself, and the strategy says what is sharded.
    replaced = ("dynamo_config", "dynamo_backend", "fp16", "parallelism_config")
    known = accelerate_yaml.launchable(config.accelerate, config.schema)
    user = {key: value for key, value in known.items() if key not in replaced}
    base = {"compute_environment": "LOCAL_MACHINE", "rdzv_backend": "static", "same_network": True, **user}
    return accelerate_yaml.merge(accelerate_yaml.merge(base, ours), distributed.accelerate)


def _name_for(node: int, name: str) -> str:
    """A file name in the run directory: "accelerate.yaml" on node 0, "accelerate.node-1.yaml" on node 1."""
    stem, dot, ending = name.partition(".")
    return name if node == 0 else f"{stem}.node-{node}{dot}{ending}"


def write_launch_files(directory: RunDirectory, config: Config, plugins: Plugins, plan: LaunchPlan) -> None:
    """Write config.toml, launch.json and, if it is used, accelerate.yaml to the run directory.

    Node 0 writes the first two; other nodes write launch.json only into a directory of their own. If the run has made
    steps, the first two are written beside the existing files and replace them when training begins
    (`RunWriter.take_launch_files`). So a launch that is refused, for example because its options do not match the checkpoint,
    changes nothing.
    """
    described = {
        **cast(dict[str, object], config.masked(plan.as_json())),
        "plugins": list(plugins.versions),
        "digest": config.digest,
        "version": version("smalti"),
        "values": config.shared_values(),
        "defaults": {name: value for name, value in config.defaults().items() if name not in PER_MACHINE},
        "user_accelerate": dict(config.accelerate),
    }
    options = config[LaunchOptions]
    if options.machine_rank == 0 or not options.shared_output_dir:
        atomic_write(_place_for(directory.launch_file, directory), json.dumps(described, indent=2).encode())
    if options.machine_rank == 0:
        from smalti.config import as_toml

        atomic_write(_place_for(directory.config_file, directory), as_toml(config, defaults=True).encode())
    if plan.accelerate_file is not None:
        atomic_write(plan.accelerate_file, yaml_text(plan.accelerate).encode())


def _place_for(file: Path, directory: RunDirectory) -> Path:
    """The file itself if the run has made no step, else the file that will replace it."""
    waiting = directory.next_of(file)
    if directory.latest("step") is not None:
        return waiting
    waiting.unlink(missing_ok=True)
    return file


def yaml_text(values: Mapping[str, object]) -> str:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=True)


def check_accelerators(config: Config, kind: str) -> None:
    """Raise PreflightError if this node lacks the accelerators that the launch needs. Imports torch."""
    options = config[LaunchOptions]
    expected = expected_kind(config)
    if kind == "cpu":
        if expected is not None:
            said = config.accelerate["distributed_type"]
            raise PreflightError(
                f"the Accelerate YAML says {said}, but this node has no usable {expected} device",
                fix="check the GPU driver (nvidia-smi); or --use_cpu to train on the CPU; or --accelerate_config=none",
            )
        if (kernel := config[TrainingOptions].sdpa_backend) in ONLY_ON_CUDA:
            raise PreflightError(
                f"the attention kernel '{kernel}' needs CUDA devices, but this node has no usable one",
                fix="check the GPU driver (nvidia-smi); or --sdpa_backend=auto",
            )
        return
    import torch

    local, present = options.num_processes // options.num_machines, torch.accelerator.device_count()
    if local > present:
        raise PreflightError(
            f"{local} processes on this node need {local} {kind} devices, but it has {present}",
            fix=f"--num_processes={present * options.num_machines} (over all nodes), or --use_cpu",
        )
