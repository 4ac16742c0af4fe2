"""A run that is killed with `kill -9` goes on as if nothing had been, and a lost rank is named."""

import os
import shutil
import signal
import time

import psutil
import pytest
import torch

SAVES_OFTEN = {
    "max_train_steps": 14,
    "use_ema": True,
    "checkpoint_step_interval": 3,
    "checkpoints_total_limit": 0,
    "lr_scheduler": "cosine",
}
TWO_RANKS = {"num_processes": 2, "train_batch_size": 2}


def workers(run) -> dict[int, psutil.Process]:
    """The processes of the ranks, by rank."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    ranks = [each for each in family if "smalti.worker" in each.cmdline() and "smalti.agent" not in each.cmdline()]
    return {int(each.environ()["RANK"]): each for each in ranks}


def kill_all(run) -> None:
    """The launcher and every process below it, none of which can say goodbye."""
    parent = psutil.Process(run.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.kill()
    run.process.wait()


def same(one, other, step: int, *, tolerance: float = 0.0) -> list[str]:
    """The tensors in which two runs differ."""
    different = []
    for group in ("model", "optimizer", "ema"):
        expected, found = one.tensors(step, group), other.tensors(step, group)
        assert expected.keys() == found.keys()
        different += [
            f"{group}/{name}"
            for name in expected
            if not torch.allclose(expected[name], found[name], rtol=0, atol=tolerance, equal_nan=True)
        ]
    return different


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    """A run on two ranks that nobody disturbs. The torture does the same on one rank."""
    return train(tmp_path_factory.mktemp("whole") / "run", **SAVES_OFTEN, **TWO_RANKS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, start_for_module):
    """The directory of such a run after all its processes were killed."""
    run = start_for_module(tmp_path_factory.mktemp("killed") / "run", **SAVES_OFTEN, **TWO_RANKS)
    run.wait_for_step(5)
    kill_all(run)
    return run.directory


def test_a_killed_run_ends_bit_equal_to_one_that_was_not(tmp_path, killed, train, whole):
    resumed = train(shutil.copytree(killed, tmp_path / "run"), **SAVES_OFTEN, **TWO_RANKS)
    assert resumed.code == 0, resumed.output
    assert same(whole, resumed, 14) == []
    assert resumed.losses[-3:] == whole.losses[-3:]


def test_what_two_ranks_began_one_rank_ends(tmp_path, killed, train, whole):
    resumed = train(shutil.copytree(killed, tmp_path / "run"), **SAVES_OFTEN, train_batch_size=4)
    assert same(whole, resumed, 14, tolerance=2e-5) == []


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path, start):
    run = start(tmp_path / "run", max_train_steps=100_000, train_batch_size=4, num_processes=2)
    run.wait_for_step(3)
    found = workers(run)
    os.kill(found[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    code, output = run.wait()
    last = next(line for line in output.splitlines() if "ended with exit code" in line)
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in last
    assert time.monotonic() - killed < 60
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in found.values())
