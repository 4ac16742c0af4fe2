"""Watching whether SLURM drains this node: SLURM does not notify a job that runs there."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

from smalti import Config
from smalti.system import preemption_signals
from smalti_cluster.options import ClusterOptions
from smalti_cluster.schedulers.slurm import node_is_leaving

CHECK_SECONDS = 60.0


def is_watched(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a job of SLURM that can be asked about this node, unless the options refuse it."""
    in_job = "SLURM_JOB_ID" in environment and "SLURMD_NODENAME" in environment
    return in_job and config[ClusterOptions].stop_on_drain and shutil.which("scontrol") is not None


@contextmanager
def stop_on_drain(
    config: Config, environment: Mapping[str, str] | None = None, *, every: float = CHECK_SECONDS
) -> Iterator[None]:
    """Within the block, a state of drain or failure of this node in SLURM has the effect of SIGUSR1 on this process, once.

    Does nothing outside of a job of SLURM, with `--no_stop_on_drain`, and where there is no scontrol.
    """
    environment = os.environ if environment is None else environment
    if not is_watched(config, environment):
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_watch, args=(environment, ended, every), name="smalti-drain", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(environment: Mapping[str, str], ended: threading.Event, every: float) -> None:
    notice = signal.SIGUSR1 if signal.SIGUSR1 in preemption_signals() else signal.SIGTERM
    while not ended.wait(every):
        if state := node_is_leaving(environment):
            click.echo(f"smalti: SLURM drains this node ({state}): the run saves and stops", err=True)
            os.kill(os.getpid(), notice)
            return
