"""A run that is killed with `kill -9` goes on as if nothing had been; if it was one rank only, from the step before."""

import random
import shutil

import pytest
import torch

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.rundir.directory import RunDirectory
from smalti_plots.goodput import read_goodput

SAVES_OFTEN = {
    "max_train_steps": 14,
    "use_ema": True,
    "checkpoint_step_interval": 3,
    "checkpoints_total_limit": 0,
    "lr_scheduler": "cosine",
}
TWO_RANKS = {"num_processes": 2, "train_batch_size": 2}


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
    run.kill()
    return run.directory


def test_a_killed_run_ends_bit_equal_to_one_that_was_not(tmp_path, killed, train, whole):
    resumed = train(shutil.copytree(killed, tmp_path / "run"), **SAVES_OFTEN, **TWO_RANKS)
    assert resumed.code == 0, resumed.output
    assert same(whole, resumed, 14) == []
    assert resumed.losses[-3:] == whole.losses[-3:]
    steps = [event["step"] for event in resumed.events("step")]
    [_, began] = [event for event in resumed.events("state") if event["state"] == "running"]
    goodput = read_goodput(RunDirectory(resumed.directory))
    assert list(goodput.causes) == ["killed"]
    assert goodput.causes["killed"].steps == len(steps) - len(set(steps)) == max(steps[: -(14 - began["step"])]) - began["step"]
    made = {event["step"]: event["seconds"] for event in resumed.events("step")}  # the later one of each
    assert goodput.seconds["training"] == pytest.approx(sum(made.values()), rel=0.1)


def test_what_two_ranks_began_one_rank_ends(tmp_path, killed, train, whole):
    resumed = train(shutil.copytree(killed, tmp_path / "run"), **SAVES_OFTEN, train_batch_size=4)
    assert same(whole, resumed, 14, tolerance=2e-5) == []


@pytest.fixture(scope="module")
def bereft(tmp_path_factory, launch):
    """A run on two ranks that never saves by itself, and the step in the middle of which one rank is killed."""
    step, victim = random.randint(2, 13), random.randint(0, 1)
    options = {**SAVES_OFTEN, **TWO_RANKS, "checkpoint_step_interval": 0}
    return launch(tmp_path_factory.mktemp("bereft") / "run", **options, spoil=f"kill:{victim}:{step}"), victim, step


def test_when_one_rank_is_killed_the_other_saves_the_step_before(bereft):
    run, victim, step = bereft
    assert run.code == 9
    [entry] = CheckpointStore(run.directory / "checkpoints").all()
    assert (entry.step, verify(entry.path).problems) == (step - 1, ())
    assert f"saved step {step - 1} from rank {1 - victim} before leaving: {entry.path}" in run.output


def test_after_one_rank_was_killed_nothing_but_the_running_step_is_lost(tmp_path, bereft, train, whole):
    run, _, step = bereft
    resumed = train(shutil.copytree(run.directory, tmp_path / "run"), **SAVES_OFTEN, **TWO_RANKS)
    assert f"at step {step - 1}" in resumed.output
    assert same(whole, resumed, 14) == []


def test_what_one_rank_saved_alone_one_rank_can_end(tmp_path, bereft, train, whole):
    resumed = train(shutil.copytree(bereft[0].directory, tmp_path / "run"), **SAVES_OFTEN, train_batch_size=4)
    assert same(whole, resumed, 14, tolerance=2e-5) == []
