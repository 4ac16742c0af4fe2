"""A fault of the accelerator in the middle of a step, in a single process: each answer of the plugins does what it says."""

import json

import pytest

from smalti.checkpoint.format.store import CheckpointStore

OPTIONS = {"max_train_steps": 6, "train_batch_size": 4}


def answered(train, directory, answer, *, spoil="fault:0:3", **options):
    return train(directory, **{**OPTIONS, **options}, spoil=spoil, variables={"PROBE_FAULT": answer})


def saved(run) -> list[int]:
    return [entry.step for entry in CheckpointStore(run.directory / "checkpoints").all()]


@pytest.mark.parametrize(
    ("answer", "code", "steps"),
    [("CONTINUE", 0, [6]), ("CHECKPOINT", 0, [2, 6]), ("STOP_SAVED", 5, [2]), ("STOP_UNSAVED", 5, [])],
)
def test_hook_on_gpu_fault_decides_whether_a_run_goes_on_and_what_it_saves(tmp_path, train, answer, code, steps):
    run = answered(train, tmp_path / "run", answer)
    assert (run.code, saved(run)) == (code, steps), run.output
    assert "an illegal memory access was encountered" in run.output


def test_the_batch_of_a_step_that_was_left_out_is_not_trained_on_later(tmp_path, train):
    run = answered(train, tmp_path / "run", "CONTINUE")
    states = [json.loads(path.read_text()) for path in (run.directory / "checkpoints").glob("*/state.json")]
    assert [(state["trainer"]["step"], state["trainer"]["position"]) for state in states] == [(6, 7)]


def test_a_device_that_does_not_recover_ends_the_run_although_the_plugins_would_go_on(tmp_path, train):
    run = answered(train, tmp_path / "run", "CHECKPOINT", spoil="faults:0:3", max_skipped_steps=3)
    assert run.code == 5
    assert len(run.calls("on_gpu_fault")) == 3
    assert "3 steps in a row were skipped" in run.output


def test_a_plugin_that_fails_over_a_fault_does_not_hide_it(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, spoil="fault:0:3", variables={"PROBE_RAISE": "on_gpu_fault"})
    assert (run.code, run.events("state")[-1]["exit_code"]) == (5, 5)
    assert "an illegal memory access was encountered" in run.events("state")[-1]["message"]
