"""From a Config to running workers: the plan, and the process that starts, watches and stops them.

One rank runs in this process. Several ranks on CPUs are started by torch's elastic launcher, because Accelerate starts one
process there; on accelerators `accelerate launch` starts them, from the user's own YAML with our settings merged in.
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
from smalti.parallel import in_bf16, is_rocm
from smalti.plugins import Plugins
from smalti.rundir import RunDirectory
from smalti.system import atomic_write
from smalti.training import ALLOCATOR_VARIABLES
from smalti.types import DistributedPlan

Launcher = Literal["in-process", "elastic", "accelerate"]

DEFAULT_PORT = 29500
"""Where machine 0 listens when several machines are given no port; torch's and Accelerate's own default."""
DIGEST_VARIABLE = "SMALTI_DIGEST"
"""Of the configuration for which workers are launched."""
_LOOPBACK = "127.0.0.1"
_KINDS = {"cuda": "MULTI_GPU", **{kind: f"MULTI_{kind.upper()}" for kind in ("xpu", "npu", "mlu", "hpu", "musa", "sdaa")}}
"""The `distributed_type` of an Accelerate YAML by the kind of accelerator."""
_ON_ANY = {"FSDP", "DEEPSPEED"}
"""Types that Accelerate launches on whatever accelerator there is, and on none but an accelerator."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that starting the workers of this machine takes, and nothing started yet.

    `environment` holds the differences only; `secrets` go into it as well and are never shown or written. `ranks` are those of
    this machine. `port` has to be free on it, because machine 0 will listen there.
    """

    launcher: Launcher
    distributed: DistributedPlan
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    accelerate: Mapping[str, object] = field(default_factory=dict)
    accelerate_file: Path | None = None
    ranks: range = range(1)
    port: int | None = None
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


def expected_kind(config: Config) -> str | None:
    """The kind of accelerator that the user's Accelerate YAML speaks of; None if of none, or if --use_cpu overrules it.

    "cuda" stands for all where the file does not say which.
    """
    if config[LaunchOptions].use_cpu:
        return None
    said = config.accelerate.get("distributed_type")
    return "cuda" if said in _ON_ANY else next((kind for kind, name in _KINDS.items() if name == said), None)


def plan_launch(
    config: Config, distributed: DistributedPlan, directory: Path, kind: str, environment: Mapping[str, str] | None = None
) -> LaunchPlan:
    """How the workers of this run are started on this machine, for a configuration that was checked.

    `kind` is what `smalti.parallel.accelerator_kind` says, `environment` that of this process. Raises UserError when the user's
    Accelerate YAML does not fit the machine.
    """
    environment = os.environ if environment is None else environment
    options = config[LaunchOptions]
    local = options.num_processes // options.num_machines
    several = options.num_machines > 1
    gpus = _chosen_gpus(config, kind, local)
    allocator = allocator_settings(kind, environment)
    if local == 1 and not several and not gpus:
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
    merged = merged_yaml(config, distributed, kind) if yaml_file else {}
    if yaml_file:
        start = ("accelerate.commands.launch", "--config_file", str(yaml_file), *_ignored_by_accelerate(merged))
    else:
        start = ("torch.distributed.run", *_elastic_arguments(options, local))
    return LaunchPlan(
        launcher="accelerate" if yaml_file else "elastic",
        distributed=distributed,
        command=(sys.executable, "-m", *start, *worker),
        environment={
            **_threads(local, environment),
            **({} if several else _loopback(environment)),
            **allocator,
            **distributed.environment,
        },
        secrets=config.secrets(),
        accelerate=merged,
        accelerate_file=yaml_file,
        ranks=range(options.machine_rank * local, (options.machine_rank + 1) * local),
        port=(options.main_process_port or DEFAULT_PORT) if several and options.machine_rank == 0 else None,
        notices=tuple(accelerate_yaml.differences(config.accelerate, merged, config.schema)) if merged else (),
    )


def _threads(local: int, environment: Mapping[str, str]) -> dict[str, str]:
    """A fair share of this machine's cores for each rank, unless the user has said something else."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // local))}


def allocator_settings(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """How torch allocates memory of devices of this kind on this machine, unless the user has said anything about that.

    Images of many sizes leave gaps of many sizes; segments that can grow leave few. CUDA under Windows, WSL and on Jetson
    devices maps no memory that way, or fails as it does, and torch for ROCm warns that it cannot.
    """
    lacking = platform.system() != "Linux" or "microsoft" in platform.release() or Path("/etc/nv_tegra_release").exists()
    if kind != "cuda" or lacking or is_rocm() or any(name in environment for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def _loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Where gloo connects the ranks of a single machine, unless the user has said something else.

    Left to itself, it looks up the host name, which in containers may have no address, or wait for name servers. NCCL reads
    addresses from the interfaces and needs no names.
    """
    if "GLOO_SOCKET_IFNAME" in environment:
        return {}
    interfaces = [
        name for name, addresses in psutil.net_if_addrs().items() if _LOOPBACK in {each.address for each in addresses}
    ]
    return {"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {}


def _chosen_gpus(config: Config, kind: str, local: int) -> list[str]:
    """The accelerators that the user's Accelerate YAML picks out; empty for all of them."""
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


def _elastic_arguments(options: LaunchOptions, local: int) -> tuple[str, ...]:
    count = (f"--nproc-per-node={local}", f"--nnodes={options.num_machines}")
    if options.num_machines == 1:
        # What --standalone does, but for names: it looks up "localhost", and the host name for the address of the ranks.
        return (*count, "--rdzv-backend=c10d", f"--rdzv-endpoint={_LOOPBACK}:0", f"--local-addr={_LOOPBACK}")
    port = options.main_process_port or DEFAULT_PORT
    return (*count, f"--node-rank={options.machine_rank}", f"--master-addr={options.main_process_ip}", f"--master-port={port}")


def _ignored_by_accelerate(merged: Mapping[str, object]) -> tuple[str, ...]:
    """Flags for the keys that `accelerate launch` accepts in its YAML and then does not read (1.12 to 1.15 at least)."""
    backend = str(merged.get("rdzv_backend") or "static")
    flags = () if backend == "static" else ("--rdzv_backend", backend)
    return (*flags, "--enable_cpu_affinity") if merged.get("enable_cpu_affinity") else flags


def merged_yaml(config: Config, distributed: DistributedPlan, kind: str) -> dict[str, object]:
    """The user's Accelerate YAML with our launch settings, then the backend's, put in; the rest stays as it was.

    A port of 0 lets Accelerate look for a free one, which only works where nobody else has to know it.
    """
    options = config[LaunchOptions]
    ours: dict[str, object] = {
        "distributed_type": _KINDS[kind] if options.num_processes > 1 else "NO",
        "num_processes": options.num_processes,
        "num_machines": options.num_machines,
        "machine_rank": options.machine_rank,
        "main_process_port": options.main_process_port or (DEFAULT_PORT if options.num_machines > 1 else 0),
        "mixed_precision": "bf16" if in_bf16(config, kind) else "no",
        "use_cpu": False,
    }
    if options.main_process_ip is not None:
        ours["main_process_ip"] = options.main_process_ip
    # smalti compiles block by block itself, and twice would be once too often; what is to be split, the backend says.
    replaced = ("dynamo_config", "dynamo_backend", "fp16", "parallelism_config")
    user = {key: value for key, value in config.accelerate.items() if key not in replaced}
    base = {"compute_environment": "LOCAL_MACHINE", "rdzv_backend": "static", "same_network": True, **user}
    return accelerate_yaml.merge(accelerate_yaml.merge(base, ours), distributed.accelerate)


def _name_for(machine: int, name: str) -> str:
    """A file name in the run directory: "accelerate.yaml" on the first machine, "accelerate.node-1.yaml" on the next."""
    stem, dot, ending = name.partition(".")
    return name if machine == 0 else f"{stem}.node-{machine}{dot}{ending}"


def write_launch_files(directory: RunDirectory, config: Config, plugins: Plugins, plan: LaunchPlan) -> None:
    """config.toml, launch.json and, where it is used, accelerate.yaml, in the run directory.

    Every machine writes launch.json, with the same values in it, so that its workers need not wait for another machine.
    Once there were steps, the first two are written beside those of the run, whose place they take when it goes on
    (`RunWriter.take_launch_files`). So a launch that is refused, because its options do not fit the checkpoint say, changes
    nothing.
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
    atomic_write(_place_for(directory.launch_file, directory), json.dumps(described, indent=2).encode())
    if config[LaunchOptions].machine_rank == 0:
        from smalti.config import as_toml

        atomic_write(_place_for(directory.config_file, directory), as_toml(config, defaults=True).encode())
    if plan.accelerate_file is not None:
        atomic_write(plan.accelerate_file, yaml_text(plan.accelerate).encode())


def _place_for(file: Path, directory: RunDirectory) -> Path:
    """The file itself until the run has made steps, after that the one that waits to take its place."""
    waiting = directory.next_of(file)
    if directory.latest("step") is not None:
        return waiting
    waiting.unlink(missing_ok=True)
    return file


def yaml_text(values: Mapping[str, object]) -> str:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=True)


def check_accelerators(config: Config, kind: str) -> None:
    """Whether this machine has what the launch is planned for. Raises PreflightError. Imports torch."""
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
