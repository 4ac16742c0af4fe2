"""A run whose newest checkpoint is damaged. Every kind of damage is tried in unit tests and in the torture."""

import shutil

import pytest

OPTIONS = {"max_train_steps": 6, "train_batch_size": 4, "use_ema": True, "checkpoint_step_interval": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    run = train(tmp_path_factory.mktemp("damage") / "run", **OPTIONS)
    (run.directory / "checkpoints/step-00000006/manifest.json").unlink()
    return run


def test_a_run_goes_on_from_the_one_before_and_says_why(run, train, tmp_path):
    resumed = train(shutil.copytree(run.directory, tmp_path / "run"), **{**OPTIONS, "max_train_steps": 7})
    assert resumed.code == 0, resumed.output
    assert any("skipped step-00000006: manifest.json is missing" in line for line in resumed.output.splitlines())
    assert f"resuming from {tmp_path}/run/checkpoints/step-00000004 at step 4" in resumed.output


def test_a_damaged_one_that_is_asked_for_is_refused(run, train):
    refused = train(run.directory, **{**OPTIONS, "max_train_steps": 7}, resume_from_checkpoint="6")
    assert (refused.code, "manifest.json is missing" in refused.output) == (8, True)
