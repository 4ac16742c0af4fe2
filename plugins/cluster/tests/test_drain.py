"""A node that SLURM drains while a run trains there: the run gets the signal of a scheduler."""

import os
import signal
import time

import pytest

from smalti.system import signal_handler
from smalti_cluster.limits.drain import stop_on_drain

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.fixture
def notices(tmp_path, monkeypatch):
    """notices(state, environment, "--flag") -> whether SIGUSR1 came, at most a while after the node got this state."""

    def watched(configure, state: str, environment: dict[str, str], *flags: str, seconds: float) -> bool:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho NodeName=n1 State={state}\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        came: list[int] = []  # no Event: a handler that interrupts the wait for it would wait for its lock
        with (
            signal_handler([signal.SIGUSR1], lambda number, frame: came.append(number)),
            stop_on_drain(configure(*flags), environment, every=0.01),
        ):
            end = time.monotonic() + seconds
            while not came and time.monotonic() < end:
                time.sleep(0.01)
        return bool(came)

    return watched


def test_a_node_that_drains_stops_the_run(notices, configure, capsys):
    assert notices(configure, "MIXED+DRAIN", JOB, seconds=100)
    assert "SLURM drains this node (MIXED+DRAIN)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "environment", "flags"),
    [("MIXED", JOB, ()), ("MIXED+DRAIN", {}, ()), ("MIXED+DRAIN", JOB, ("--no_stop_on_drain",))],
)
def test_all_others_train_on(notices, configure, state, environment, flags):
    assert not notices(configure, state, environment, *flags, seconds=0.3)
