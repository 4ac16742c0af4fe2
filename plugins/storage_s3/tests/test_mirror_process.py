"""The process that uploads, and runs that use it: it outlives the run, and the run outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smalti import UserError
from smalti.data import LocalStorage
from smalti.rundir import RunDirectory, acquire
from smalti_data.remote.checkpoints import RemoteRun
from smalti_storage_s3.mirror.ownership import Lease
from smalti_storage_s3.mirror.process import UploadProcess
from support.checkpoints import make


@pytest.fixture
def place(tmp_path) -> Path:
    folder = tmp_path / "nas"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    acquire(directory).close()
    return directory


@pytest.fixture
def uploads(run, place):
    process = UploadProcess(run.path, [f"--to={place}", "--timeout=60", "--keep=2"])
    yield process
    process.stop()


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def names(place: Path) -> list[str]:
    return [each.name for each in RemoteRun(LocalStorage(place)).published()]


def test_checkpoints_arrive_while_the_process_runs_and_the_last_one_is_waited_for(run, place, uploads):
    make(run.checkpoints, 1)
    uploads.start()  # what an earlier launch has left
    wait_for(lambda: names(place) == ["step-00000001"], "the first")
    make(run.checkpoints, 2)
    uploads.notify()
    wait_for(lambda: len(names(place)) == 2, "the second")
    make(run.checkpoints, 3)
    assert uploads.finish(60) == "step-00000003"
    assert names(place) == ["step-00000002", "step-00000003"]


def test_an_uploader_that_was_killed_is_started_again_for_the_next_checkpoint(run, place, uploads):
    uploads.start()
    os.kill(uploads._process.pid, signal.SIGKILL)
    uploads._process.wait()
    make(run.checkpoints, 1)
    uploads.notify()
    assert uploads.finish(60) == "step-00000001"


def test_a_failure_is_reported_with_its_cause_and_tried_again(run, place, uploads):
    uploads.start()
    (place / "checkpoints").write_text("in the way")
    make(run.checkpoints, 1)
    uploads.notify()
    found: list[tuple[str, str]] = []
    wait_for(lambda: found.extend(uploads.failures()) or found, "the failure")
    assert str(place / "checkpoints") in found[0][0]
    (place / "checkpoints").unlink()
    uploads.notify()
    assert uploads.finish(60) == "step-00000001"


def test_what_did_not_arrive_in_time_is_an_error_that_says_how_to_repeat_it(run, place, uploads):
    uploads.start()
    (place / "checkpoints").write_text("in the way")
    make(run.checkpoints, 1)
    with pytest.raises(UserError, match="not complete after 0 s") as failure:
        uploads.finish(0.2)
    assert failure.value.fix.startswith(f"smalti mirror push {run.path} --to={place}")


def test_a_mirror_of_another_run_is_refused_before_the_first_step(place, uploads):
    Lease.take(LocalStorage(place), "another")
    with pytest.raises(UserError, match="is the mirror of another run: another"):
        uploads.start()


KILLED_AFTER_SAVING = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from smalti_storage_s3.mirror.process import UploadProcess
from support.checkpoints import make
uploads = UploadProcess(Path(sys.argv[1]), ["--to=" + sys.argv[2], "--timeout=60"])
uploads.start()
make(Path(sys.argv[1]) / "checkpoints", 7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_saved_last_arrives_although_the_run_was_killed(run, place):
    tests = Path(__file__).parents[3] / "tests"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_SAVING, str(run.path), str(place), str(tests)], check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: names(place) == ["step-00000007"], "the checkpoint of the killed run")
