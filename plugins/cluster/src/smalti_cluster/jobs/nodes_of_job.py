"""What the script of a SLURM job asks: on which nodes the run can train, and how it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from smalti import ExitCode
from smalti.rundir import RunDirectory
from smalti_cluster.elastic.excluded import read_excluded
from smalti_cluster.schedulers.hostlist import expand_hostlist
from smalti_cluster.schedulers.slurm import unusable_nodes
from smalti_health import read_circuits

FAULT_DAYS = 7.0
"""A node is not used for this long after a fault of an accelerator that has ended the run, unless the fault is reset."""
FRUITLESS_LAUNCHES = 3
"""A job is not queued again after this many launches in a row without a new step."""
_CLOCKS = 60.0
"""The clocks of the nodes may differ by this much, in seconds."""


def nodes_with_faults(directory: Path, now: float | None = None) -> set[str]:
    """The hosts, without their domains, on which accelerators have failed in this run, and those that its group excludes.

    See `smalti_health.circuit_file` and `smalti_cluster.elastic.excluded`.
    """
    since = (time.time() if now is None else now) - FAULT_DAYS * 86400
    faults = (fault for circuit in read_circuits(directory).values() for fault in circuit.faults)
    hosts = [fault.host for fault in faults if fault.time > since] + [each.host for each in read_excluded(directory)]
    return {host.partition(".")[0] for host in hosts}


def split_nodes(directory: Path, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The nodes of this SLURM job that the run can use, and all others that it cannot use, in or outside of the job."""
    names = expand_hostlist(environment.get("SLURM_JOB_NODELIST", ""))
    faulty = nodes_with_faults(directory)
    unusable = {name for name in names if name.partition(".")[0] in faulty} | unusable_nodes(names)
    return [name for name in names if name not in unusable], sorted(unusable | faulty)


def result_of(directory: Path, status: int, since: float) -> int:
    """The exit code of the run, from what srun has returned and what the run directory says of a launch `since` then.

    srun returns the highest exit code of all nodes; 0 too if a node has failed and its job goes on without it; more than 128 if
    processes were killed by a signal, also after the run had ended.
    """
    if 0 < status < 128:
        return status
    run = RunDirectory(directory)
    record = run.record()
    if record is not None and record.started is not None and record.started > since - _CLOCKS:
        found = run.status()
        if found.ended and found.exit_code is not None:
            return found.exit_code
    return status or int(ExitCode.KILLED)


def launches_without_step(directory: Path) -> int:
    """How many launches in a row, up to the last one, have made no step that the run had not made before."""
    launches: dict[float, bool] = {}
    step, attempt = 0, None
    for event in RunDirectory(directory).events():
        attempt = event.number("attempt") if event.kind == "state" else attempt
        if attempt is not None:
            launches.setdefault(attempt, False)
        if event.kind == "step" and (event.step or 0) > step:
            step = event.step or 0
            if attempt is not None:
                launches[attempt] = True
    return next((count for count, fruitful in enumerate(reversed(launches.values())) if fruitful), len(launches))
