"""Runs of `smalti train` over the nodes of the job of SLURM that this process is in."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from gpuday.checks import Check, Figures, Work
from gpuday.measures import last, losses, speeds, train, wait
from gpuday.processes import CheckError, Setting, command, hosts_of_job, kill, srun, tail
from smalti.rundir import RunDirectory


def nodes_save(check: Check, setting: Setting, folder: Path) -> Figures:
    """A run sharded over all ranks that saves three times; the checkpoints are read back."""
    more = ("--fsdp_enable", "--checkpoint_step_interval=10", "--checkpoints_total_limit=0", "--max_train_steps=30")
    process = _start(check, setting, folder, train(setting, folder, "run", more, work=_work(check), large=True))
    if process.wait():
        raise CheckError(f"the run ended with exit code {process.returncode}\n{tail(folder / 'tested.log')}")
    made = [event for event in RunDirectory(folder / "run").events() if event.kind == "checkpoint"]
    unverified = command(setting, ("smalti", "checkpoint", "verify", str(folder / "run")), folder / "verified.log")
    return {
        "checkpoints": len(made),
        "unverified": int(unverified != 0),
        "gb_per_second": max(speeds(made), default=None),
    }


def nodes_elastic(check: Check, setting: Setting, folder: Path) -> Figures:
    """A run on one or two nodes, whose second one loses all processes of the run."""
    more = ("--nodes=1:2", "--node_timeout=10", "--checkpoint_step_interval=10", "--max_train_steps=100000")
    words, run = train(setting, folder, "run", more, work=_work(check)), RunDirectory(folder / "run")
    log = folder / "tested.log"
    process = _start(check, setting, folder, words)
    try:
        wait(lambda: last(run, "checkpoint") > 0, "a checkpoint", process, log)
        _kill_on(setting, hosts_of_job()[1], run.path)
        lost, began = last(run, "step"), time.time()
        wait(lambda: _resumed(run, began) is not None, "a step of the other node", process, log)
        first = _resumed(run, began) or 0
        wait(lambda: last(run, "step") >= first + 3, "three more steps", process, log)
        begun = [event for event in run.events() if event.kind == "state" and event.text("state") == "starting"]
        ranks = begun[-1].number("world_size") or math.nan
        run.request("stop")
        process.wait(120)
    finally:
        kill(process)
    found = losses(run)
    return {
        "lost_steps": max(0, lost + 1 - first),
        "steps_after": max(found) - first,
        "nodes_after": ranks / setting.per_node,
    }


def _work(check: Check) -> Work:
    return Work(ranks=check.nodes * check.gpus, nodes=check.nodes)


def _resumed(run: RunDirectory, since: float) -> int | None:
    """The first step that a launch has made that began after this time."""
    started = False
    for event in run.events():
        started = started or (event.kind == "state" and event.text("state") == "running" and event.time > since)
        if started and event.kind == "step":
            return event.step
    return None


def _start(check: Check, setting: Setting, folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """`python -m WORDS` on each node of the check, as `smalti launch slurm` starts it."""
    script = f'exec {shlex.join([sys.executable, "-m", *words])} --machine_rank="$SLURM_NODEID"'
    with (folder / "tested.log").open("a") as output:
        return subprocess.Popen(
            srun(check.nodes, script, tasks=check.nodes),
            env=setting.environment("tested"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _kill_on(setting: Setting, host: str, directory: Path) -> None:
    """SIGKILL for all processes of the run on this node, in a step of the job."""
    script = shlex.join([sys.executable, "-m", "gpuday.nodes", str(directory)])
    subprocess.run(
        srun(1, script, tasks=1, hosts=[host]), env=setting.environment("check"), stdin=subprocess.DEVNULL, check=True
    )


def _kill_here(directory: str) -> int:
    """How many processes were killed: those whose command names the run's directory, and what they have started."""
    own = psutil.Process()
    found: set[psutil.Process] = set()
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if any(directory in word for word in each.cmdline()):
                found |= {each, *each.children(recursive=True)}
    found -= {own, *own.parents()}
    for each in found:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return len(found)


if __name__ == "__main__":
    sys.exit(0 if _kill_here(sys.argv[1]) else f"no process of {sys.argv[1]} runs here")
