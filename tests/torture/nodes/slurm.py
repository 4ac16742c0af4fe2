"""D11: jobs that `smalti launch slurm` writes, under a real SLURM with three nodes of which the run needs two."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from smalti_health import CircuitFault
from smalti_health.circuits import open_circuit
from support.nodes import Cluster
from support.slurm import Slurm, SlurmRun, slurm_forbidden

from ..subject import Report

_LOST_SECONDS = 180


def lost_node(slurm: Slurm, report: Report) -> None:
    """Without spares the job is queued again, and resumes on the nodes that are left."""
    run = SlurmRun(slurm, nodes=2, words=["--node_timeout=10"])
    step = run.wait_for_step(3)
    slurm.cluster.kill(1)
    run.wait_for_restart(_LOST_SECONDS)
    slurm.start_now(run.job)
    run.wait_for_step(step)
    report.expect("node1" not in _nodes(run), f"it runs on {_nodes(run)}")


def lost_node_with_spare(slurm: Slurm, report: Report) -> None:
    """A spare takes the place of a lost node within the job."""
    run = SlurmRun(slurm, nodes=2, words=["--node_timeout=10", "--spares=1"])
    step = run.wait_for_step(3)
    lost = time.time()
    slurm.cluster.kill(1)
    run.since = lost + 10
    run.wait_for_step(step, _LOST_SECONDS)
    report.expect(slurm.job(run.job)["Restarts"] == "0", "the job was queued again")
    report.expect("node 0 is node0" in run.output.rpartition("smalti: note: this is node")[2], run.output)


def lost_node_of_a_range(slurm: Slurm, report: Report) -> None:
    """A run on a range of nodes continues without a lost one within the job, whose result is that of the run."""
    run = SlurmRun(slurm, nodes="1:2", words=["--node_timeout=10"])
    step = run.wait_for_step(3)
    slurm.cluster.kill(1)
    run.since = time.time() + 10
    run.wait_for_step(step, _LOST_SECONDS)
    report.expect(slurm.job(run.job)["Restarts"] == "0", "the job was queued again")
    run.ask_to_stop()
    run.wait_for_state("FAILED")
    report.expect(slurm.job(run.job)["ExitCode"] == "7:0", slurm.job(run.job)["ExitCode"])


def drained_node(slurm: Slurm, report: Report) -> None:
    """The run notices that SLURM drains one of its nodes, saves, and resumes on another one."""
    run = SlurmRun(slurm, nodes=2)
    step = run.wait_for_step(3)
    slurm.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=fan")
    run.wait_for_restart(_LOST_SECONDS)
    report.expect(run.ended_with() == 6, f"ended with {run.ended_with()}")
    report.expect("SLURM drains this node" in run.output, run.output)
    slurm.start_now(run.job)
    run.wait_for_step(step + 1)
    report.expect("node1" not in _nodes(run), f"it runs on {_nodes(run)}")


def cancelled_job(slurm: Slurm, report: Report) -> None:
    """`scancel` ends a job for good, after a save."""
    run = SlurmRun(slurm, nodes=2)
    run.wait_for_step(3)
    slurm.run("scancel", str(run.job))
    run.wait_for_state("CANCELLED")
    time.sleep(5)
    report.expect(slurm.job(run.job)["Restarts"] == "0", "the job was queued again")
    report.expect(run.state == "CANCELLED", f"it is {run.state}")
    report.expect(run.ended_with() == 6, f"ended with {run.ended_with()}: {run.directory.status().message}")
    report.expect("was cancelled, so it is not queued again" in run.output, run.output)


def lost_daemon(slurm: Slurm, report: Report) -> None:
    """The daemon of SLURM on one node is killed, but not the run: SLURM queues the job again, which resumes elsewhere."""
    run = SlurmRun(slurm, nodes=2)
    step = run.wait_for_step(3)
    slurm.kill_daemon(1)
    run.wait_for_restart(_LOST_SECONDS)
    slurm.start_now(run.job)
    run.wait_for_step(step)
    report.expect("node1" not in _nodes(run), f"it runs on {_nodes(run)}")


def time_limit(slurm: Slurm, report: Report) -> None:
    """A job saves before its time limit, and is queued again.

    It is stopped 70 s before the limit, as no save was measured yet: on a busy machine nodes need a minute to their first step.
    """
    run = SlurmRun(slurm, nodes=2, words=["--time=3", "--grace_seconds=60", "--stop_before=10s"])
    step = run.wait_for_step(3)
    run.wait_for_restart(_LOST_SECONDS)
    report.expect(run.ended_with() == 6, f"ended with {run.ended_with()}: {run.directory.status().message}")
    slurm.start_now(run.job)
    run.wait_for_step(step + 1)


def faulty_node(slurm: Slurm, report: Report) -> None:
    """A job that gets a node on which an accelerator has failed submits itself again without it."""
    folder = slurm.cluster.place / "job" / "run"
    folder.mkdir(parents=True)
    open_circuit(folder, 0, CircuitFault(kind="ecc", time=time.time(), step=1, host="node1.cluster", rank=0))
    run = SlurmRun(slurm, nodes=2)
    run.wait_for_state("FAILED")
    report.expect(slurm.job(run.job)["ExitCode"] == "5:0", slurm.job(run.job)["ExitCode"])
    run.job += 1
    run.wait_for_step(2)
    report.expect("node1" not in _nodes(run), f"it runs on {_nodes(run)}")


SCENARIOS: Mapping[str, Callable[[Slurm, Report], None]] = {
    each.__name__: each
    for each in (
        lost_node,
        lost_node_with_spare,
        lost_node_of_a_range,
        drained_node,
        cancelled_job,
        lost_daemon,
        time_limit,
        faulty_node,
    )
}


def _nodes(run: SlurmRun) -> list[str]:
    """The nodes of the job."""
    return run.slurm.run("scontrol", "show", "hostnames", run.slurm.job(run.job)["NodeList"]).split()


def slurm_jobs(chance: Random, place: Path, *, names: tuple[str, ...] | None = None) -> Report:
    """D11: one scenario; or those that are named."""
    report = Report()
    if reason := slurm_forbidden():
        print(f"      D11: not possible here: {reason}", flush=True)
        return report
    for name in names or (chance.choice(sorted(SCENARIOS)),):
        begun, own = time.monotonic(), Report()
        with Cluster(4) as cluster:
            try:
                SCENARIOS[name](Slurm(cluster), own)
            except (RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:  # a command of SLURM failed
                own.broken.append(f"{type(error).__name__}: {error}")
        report.faults += 1
        report.broken += [f"{name}: {each}" for each in own.broken]
        judged = "BROKEN" if own.broken else "held"
        print(f"      D11: {name:<24} | {time.monotonic() - begun:5.1f} s | {judged}", flush=True)
    return report


def one_slurm_job(chance: Random, place: Path) -> Report:
    """D11 in short."""
    return slurm_jobs(chance, place, names=("faulty_node",))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        found = slurm_jobs(Random(0), Path(folder), names=tuple(sys.argv[1:]) or tuple(SCENARIOS))
    print(*found.broken, sep="\n")
