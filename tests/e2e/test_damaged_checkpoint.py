"""A run whose newest checkpoint is damaged, and the commands of docs/checkpoints.md that look at it."""

import json
import shutil
import subprocess
import sys

import pytest

OPTIONS = {"max_train_steps": 6, "train_batch_size": 4, "use_ema": True, "checkpoint_step_interval": 2}


def flip(path):
    (file,) = (path / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "does not match its digest": flip,
    "has 10 bytes where the manifest says": lambda path: (path / "state.json").write_text("0123456789"),
    "is missing": lambda path: next((path / "optimizer").iterdir()).unlink(),
    "there is no manifest.json": lambda path: (path / "manifest.json").unlink(),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    return train(tmp_path_factory.mktemp("damage") / "run", **OPTIONS)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run.directory, tmp_path / "run")


def checkpoint(*words):
    command = [sys.executable, "-m", "smalti", "checkpoint", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_run_goes_on_from_the_one_before_and_says_why(copy, train, reason):
    DAMAGES[reason](copy / "checkpoints" / "step-00000006")
    resumed = train(copy, **{**OPTIONS, "max_train_steps": 7})
    assert resumed.code == 0, resumed.output
    skipped = next(line for line in resumed.output.splitlines() if "skipped step-00000006" in line)
    assert reason in skipped
    assert f"resuming from {copy}/checkpoints/step-00000004 at step 4" in resumed.output


def test_a_damaged_one_that_is_asked_for_is_refused(copy, train):
    flip(copy / "checkpoints" / "step-00000006")
    refused = train(copy, **{**OPTIONS, "max_train_steps": 7}, resume_from_checkpoint="6")
    assert (refused.code, "does not match its digest" in refused.output) == (2, True)


def test_the_commands_show_what_is_there_and_what_is_damaged(copy):
    flip(copy / "checkpoints" / "step-00000006")
    assert [checkpoint("ls", copy).stdout.count("step-0000000"), checkpoint("verify", copy).returncode] == [3, 1]
    assert "step-00000006  DAMAGED" in checkpoint("verify", copy).stdout
    assert "optimizer: 93 tensors" in checkpoint("inspect", copy / "checkpoints" / "step-00000004").stdout
    assert json.loads(checkpoint("ls", copy, "--json").stdout)
