"""A run stops in time for its time limit, and does not begin a save for which there is no time."""

import pytest

from smalti.checkpoint.format.store import CheckpointStore
from support.whole import some

ENDLESS = {"max_train_steps": 100_000, "train_batch_size": 2}


def steps(directory) -> list[int]:
    return [entry.step for entry in CheckpointStore(directory / "checkpoints").all()]


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_run_stops_before_its_time_limit_with_a_checkpoint(tmp_path, train, ranks):
    ended = train(tmp_path / "run", **ENDLESS, num_processes=ranks, time_limit="1m", stop_before="1s")
    assert (ended.code, "by the time limit: the next step and a save need 60 s" in ended.output) == (6, True), ended.output
    assert steps(tmp_path / "run") == [1]


def test_the_next_launch_knows_how_long_saves_take(tmp_path, train):
    train(tmp_path / "run", **ENDLESS | {"max_train_steps": 2})
    ended = train(tmp_path / "run", **ENDLESS | {"max_train_steps": 4}, time_limit="50s", stop_before="0s")
    assert ended.code == 0, ended.output


@pytest.mark.parametrize(("ranks", "who"), some([(1, 0), (2, 1)], (2, 1)))
def test_a_save_that_cannot_end_in_time_is_not_begun_and_the_newest_one_is_named(tmp_path, train, ranks, who):
    options = {"checkpoint_step_interval": 2, "checkpoint_async": False, "grace_seconds": 0, "num_processes": ranks}
    ended = train(tmp_path / "run", **ENDLESS, **options, spoil=f"preempt:{who}:3")
    assert (ended.code, steps(tmp_path / "run")) == (9, [2]), ended.output
    assert "preempted at step 3 of 100000 without a checkpoint of it: the last save took" in ended.output
    assert "are left of --grace_seconds=0; the newest is " in ended.output


def test_a_save_that_ends_in_time_is_made(tmp_path, train):
    ended = train(tmp_path / "run", **ENDLESS, checkpoint_step_interval=2, grace_seconds=600, spoil="preempt:0:3")
    assert (ended.code, steps(tmp_path / "run")[-1]) == (6, 3), ended.output


def test_the_time_limit_is_asked_of_slurm(tmp_path, train, monkeypatch):
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 0:05\n")
    (tmp_path / "squeue").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = train(tmp_path / "run", **ENDLESS, stop_before="0s", variables=variables)
    assert (ended.code, "by the time limit" in ended.output) == (6, True), ended.output


def test_an_unknown_time_limit_is_a_warning(tmp_path, train):
    ended = train(tmp_path / "run", **ENDLESS | {"max_train_steps": 2}, stop_before="5m")
    assert (ended.code, ended.output.count("--stop_before has no effect: the time limit of this launch is unknown")) == (0, 1)
