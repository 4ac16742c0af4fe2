"""Which node of how many this process was started on, as schedulers and launchers say it in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from smalti_cluster.schedulers.hostlist import expand_hostlist

Value = tuple[str, str]
"""The variable that a value comes from, and the value."""
_FIRST_PORT, _PORTS = 29500, 3000
"""Ports of SLURM jobs. They end below those that Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class ScheduledNodes:
    """What `scheduler` says of the nodes. `values` has options of the launch by name.

    `nodes` is None where the scheduler numbers the nodes and does not count them. `per_node` is the number of processes for
    each node; None if it does not say how many GPUs a node has. `warning` is set, and all else empty, if tasks are not nodes.
    """

    scheduler: str
    values: Mapping[str, Value] = field(default_factory=dict)
    nodes: int | None = None
    per_node: Value | None = None
    warning: str = ""


def scheduled_nodes(environment: Mapping[str, str]) -> ScheduledNodes | None:
    """From SLURM, else Kubernetes, else variables as torchrun has them; None if none of them has started this process."""
    return _slurm(environment) or _kubernetes(environment) or _torchrun(environment)


def _slurm(environment: Mapping[str, str]) -> ScheduledNodes | None:
    """The job step that srun has started, with one task on each node. A batch script alone is not a step."""
    step, job = environment.get("SLURM_STEP_ID"), environment.get("SLURM_JOB_ID", "")
    nodes = _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if step is None or nodes is None or not nodes[1].isdigit() or "SLURM_NODEID" not in environment:
        return None
    name, count = f"SLURM job {job}", int(nodes[1])
    tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes
    if tasks[1] != nodes[1]:
        warning = f"{tasks[0]} is {tasks[1]} on {count} nodes: nothing is taken from SLURM, as srun starts tasks, not nodes"
        return ScheduledNodes(scheduler=name, warning=warning if count > 1 else "")
    values = {"num_machines": nodes, "machine_rank": ("SLURM_NODEID", environment["SLURM_NODEID"])}
    if (listed := _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")) is not None:
        with suppress(ValueError, IndexError):  # then the address has to be given
            values["main_process_ip"] = (listed[0], expand_hostlist(listed[1])[0])
    if job.isdigit():
        values["main_process_port"] = ("SLURM_JOB_ID", str(_FIRST_PORT + int(job) % _PORTS))
    gpus = _first(environment, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
    return ScheduledNodes(scheduler=name, values=values, nodes=count, per_node=_count_of(gpus))


def _kubernetes(environment: Mapping[str, str]) -> ScheduledNodes | None:
    """A pod of an indexed job. The job must say how many pods there are; its own name and that of its service may be equal."""
    index = environment.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    found = _torchrun(environment)
    values = dict(found.values) if found is not None else {}
    values["machine_rank"] = ("JOB_COMPLETION_INDEX", index)
    pod, job = environment.get("HOSTNAME", ""), environment.get("HOSTNAME", "").removesuffix(f"-{index}")
    if "main_process_ip" not in values and job != pod:
        values["main_process_ip"] = ("HOSTNAME", f"{job}-0.{job}")
    nodes, per_node = (found.nodes, found.per_node) if found is not None else (None, None)
    return ScheduledNodes(scheduler="Kubernetes", values=values, nodes=nodes, per_node=per_node)


def _torchrun(environment: Mapping[str, str]) -> ScheduledNodes | None:
    """The variables that launchers set before they call torchrun, those that torchrun reads, and those that it sets."""
    rank = _first(environment, "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
    nodes = _first(environment, "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")
    address, port = _first(environment, "MASTER_ADDR", "PET_MASTER_ADDR"), _first(environment, "MASTER_PORT", "PET_MASTER_PORT")
    if (endpoint := _first(environment, "PET_RDZV_ENDPOINT")) is not None and address is None:
        host, _, number = endpoint[1].rpartition(":")
        if host and number.isdigit():
            address, port = (endpoint[0], host), (endpoint[0], number)
    options = {"num_machines": nodes, "machine_rank": rank, "main_process_ip": address, "main_process_port": port}
    if (rank is None and "JOB_COMPLETION_INDEX" not in environment) or (nodes is not None and not nodes[1].isdigit()):
        return None
    return ScheduledNodes(
        scheduler="torchrun's variables",
        values={name: value for name, value in options.items() if value is not None},
        nodes=int(nodes[1]) if nodes is not None else None,
        per_node=_count_of(_first(environment, "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "PET_NPROC_PER_NODE")),
    )


def _first(environment: Mapping[str, str], *names: str) -> Value | None:
    """The first of these variables that is set and not empty."""
    return next(((name, environment[name]) for name in names if environment.get(name)), None)


def _count_of(value: Value | None) -> Value | None:
    """A number of GPUs, which SLURM may write with their type: "8", "a100:8" or "gpu:a100:8"."""
    if value is None:
        return None
    number = value[1].partition("(")[0].rpartition(":")[2]
    return (value[0], number) if number.isdigit() and int(number) > 0 else None
