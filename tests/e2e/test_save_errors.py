"""A run on a disk that fills up: it says so, trains on or stops as asked, and what was saved before stays."""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.rundir.directory import RunDirectory
from smalti_plots.goodput import read_goodput
from support.whole import some

MIB = 2**20
OPTIONS = {
    "max_train_steps": 8,
    "train_batch_size": 4,
    "use_ema": True,
    "checkpoint_step_interval": 2,
    "checkpoints_total_limit": 0,
}


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB: room for the files of a run and one checkpoint of 2.8 MiB, and none for two."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False).returncode:
        pytest.skip("only root can make a small file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)  # processes that stand ready may still map files of a run


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_run_trains_on_when_the_disk_is_full_and_fails_in_the_end(small_disk, launch, ranks):
    run = launch(small_disk / "run", **{**OPTIONS, "train_batch_size": 4 // ranks}, num_processes=ranks, probe=False)
    last = next(line for line in run.output.splitlines() if "ended with exit code 1" in line)
    assert "No space left on device" in last
    assert "MiB needed, " in last
    (entry,) = CheckpointStore(run.directory / "checkpoints").all()
    assert verify(entry.path).ok
    assert f"the last good checkpoint is {entry.path}" in last
    assert "free space there" in run.output
    assert entry.step == 2  # it has room, whatever the ranks have written by the time the first of them looks
    # Not from the events: while a save fills the disk, a line of theirs may have no room either.
    assert [step for step in range(1, 9) if f"cannot save step {step} " in run.output] == [4, 6, 8]
    [final] = (line for line in run.output.splitlines() if "cannot save step 8" in line and "last good" not in line)
    assert "training continues" not in final


def test_a_run_stops_if_that_was_asked_for_and_hook_on_checkpoint_failed_hears_of_it(small_disk, launch):
    run = launch(small_disk / "run", **OPTIONS, on_save_error="stop")
    assert run.code == 1
    assert len(run.losses) < 8
    assert "the last good checkpoint is" in run.output
    assert "No space left on device" in run.calls("on_checkpoint_failed")[0]["error"]


def test_the_next_interval_tries_again(small_disk, start):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MIB))
    run = start(small_disk / "run", **{**OPTIONS, "max_train_steps": 100_000, "checkpoints_total_limit": 1})
    run.wait_for_step(5)
    ballast.unlink()
    run.wait_for_step(25)
    run.process.terminate()
    code, output = run.wait()
    assert code in (1, 6)  # two checkpoints at once need not find room on this disk
    assert "training continues" in output
    assert CheckpointStore(small_disk / "run" / "checkpoints").latest() is not None


def test_a_run_pauses_until_there_is_room_and_answers_meanwhile(small_disk, train):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3 * MIB))
    options = {"max_train_steps": 4, "train_batch_size": 2, "checkpoint_step_interval": 0, "num_processes": 2}
    directory = RunDirectory(small_disk / "run")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(train, directory.path, **options, disk_low="2MiB", on_disk_low="pause")
        assert eventually(lambda: (phase := directory.phase()) is not None and phase.name == "paused")
        answer = directory.answer(directory.request("sample"), timeout=30)
        assert [event.step for event in directory.events() if event.kind == "step"] == [1]
        ballast.unlink()
        run = running.result()
    assert run.code == 0, run.output
    assert answer is not None
    assert "no validation_prompt" in answer.text("message")
    first, second = [event["message"] for event in run.events("warning")]
    assert first.endswith("less than disk_low=2MiB: no steps are made until there is room")
    assert second.endswith("free again: training continues")
    assert read_goodput(directory).seconds["paused"] > 0


@pytest.mark.parametrize(("action", "code", "step"), [("stop", 1, 1), ("warn", 0, 3)])
def test_a_run_that_is_short_of_space_stops_with_a_checkpoint_or_says_so(tmp_path, train, action, code, step):
    run = train(tmp_path / "run", max_train_steps=3, train_batch_size=4, disk_low="9000T", on_disk_low=action)
    assert run.code == code, run.output
    assert "free, less than disk_low=9000T" in run.output
    [saved] = CheckpointStore(run.directory / "checkpoints").all()
    assert (saved.step, verify(saved.path).ok) == (step, True)
    [warning] = run.events("warning")
    assert "less than disk_low=9000T" in warning["message"]
