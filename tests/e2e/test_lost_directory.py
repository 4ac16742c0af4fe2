"""The directory of a run is removed or moved away while the run goes on."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from smalti.checkpoint.format.store import CheckpointStore
from smalti.errors import ExitCode
from smalti.rundir.directory import RunDirectory
from support.whole import some

GATED = Path(__file__).parent / "gated"
ENDLESS = {"max_train_steps": 100_000, "train_batch_size": 4, "checkpoint_step_interval": 2, "without": []}


REMOVED = "was removed|was moved to .*/gone;"
"""What a run says after `remove`: the second if it looks between the renaming and the removal."""


def remove(directory: Path) -> None:
    """All of it, whatever is written there meanwhile."""
    gone = directory.with_name("gone")
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # the run may remove a file of it first


def wait_for_checkpoint(run) -> None:
    """Until there is one where the run saves, and a heartbeat beside it."""
    deadline, directory = time.monotonic() + 90, RunDirectory(run.directory)
    while directory.status().condition != "running" or CheckpointStore(run.directory / "checkpoints").latest() is None:
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("ranks", "how"), some([(1, "removed"), (2, "moved")], (2, "moved")))
def test_the_run_says_so_once_and_can_be_resumed_from_the_directory_that_it_makes_again(tmp_path, start, train, ranks, how):
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run = start(directory, **ENDLESS, num_processes=ranks)
    run.wait_for_step(3)
    began = RunDirectory(directory).record()
    if how == "removed":
        remove(directory)
    else:
        directory.rename(elsewhere)
    wait_for_checkpoint(run)
    RunDirectory(directory).request("stop")
    code, output = run.wait()
    seen = [event.step for event in RunDirectory(directory).events() if event.kind == "step"]
    last = seen[-1]
    resumed = train(directory, config=directory / "config.toml", max_train_steps=last + 2)

    said = REMOVED if how == "removed" else "was moved"
    assert (code, len(re.findall(f"{directory} (?:{said})", output))) == (ExitCode.STOPPED, 1), output
    assert f"{directory / 'config.toml'}" in output.partition("to resume")[2]
    assert seen[0] == 1
    assert RunDirectory(directory).record().id == began.id
    assert (resumed.code, resumed.events("step")[-1]["step"]) == (0, last + 2), resumed.output
    assert (directory / "loss.png").exists()
    if how == "moved":
        assert (RunDirectory(elsewhere).status().condition, f"{elsewhere}" in output) == ("stopped", True)


def test_a_run_that_loses_what_it_has_encoded_saves_and_leaves(tmp_path, start, train):
    directory = tmp_path / "run"
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(GATED), os.environ.get("PYTHONPATH"))))}
    options = {**ENDLESS, "checkpoint_step_interval": 0, "model_family": "gated"}
    run = start(directory, **options, variables=path)
    run.wait_for_step(3)
    remove(directory)
    code, output = run.wait()
    status, saved = RunDirectory(directory).status(), CheckpointStore(directory / "checkpoints").latest()
    assert saved is not None, output
    step = int(saved.name.removeprefix("step-"))
    resumed = train(directory, config=directory / "config.toml", max_train_steps=step + 2, variables=path)
    assert (code, status.condition, status.exit_code, len(re.findall(REMOVED, output))) == (1, "failed", 1, 1), output
    assert ("can no longer be read" in output or "were lost with the run directory" in output, step >= 3) == (True, True)
    assert (resumed.code, resumed.events("step")[-1]["step"]) == (0, step + 2), resumed.output
