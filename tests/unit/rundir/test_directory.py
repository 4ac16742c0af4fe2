"""The run directory: who may be the run, how a run fares, and what survives when it dies."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from smalti.builtin.run_directory import Events
from smalti.errors import ExitCode, GpuFaultError, InUseError, UserError
from smalti.rundir.directory import RunDirectory, find_runs, watch_doubtful
from smalti.rundir.writer import ATTEMPT_VARIABLE, RunWriter, acquire, join, prepare
from smalti.system.process import Process
from smalti.types import Checkpoint, Outcome, RunState, StepResult, StopReason, ValidationImage, ValidationResult
from support.whole import some

_RUN = """
import sys, time
from smalti.rundir.writer import acquire
from smalti.rundir.directory import RunDirectory
with acquire(RunDirectory(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


@contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that is the run in `path`."""
    child = subprocess.Popen([sys.executable, "-c", _RUN, str(path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


def elsewhere(path: Path, *, age: float) -> None:
    """Make `path` look as if a run on another host had given its last sign of life so long ago."""
    directory = RunDirectory(path)
    prepare(directory)
    process = replace(Process.current(), host="other-host", pid_namespace="elsewhere")
    directory.heartbeat_file.write_text(json.dumps({"process": asdict(process), "started": time.time() - 1000}))
    beat(directory, age)


@contextmanager
def beating(directory: RunDirectory, skew: float = 0.0) -> Iterator[None]:
    """Touch the heartbeat by a clock that is ahead by `skew`, as a live run elsewhere does."""
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.02):
            beat(directory, -skew)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what is waited for before a heartbeat counts as that of a dead run."""
    monkeypatch.setattr("smalti.rundir.ownership.STALE_SECONDS", 0.4)
    monkeypatch.setattr("smalti.rundir.heartbeat.STALE_SECONDS", 0.4)
    monkeypatch.setattr("smalti.rundir.heartbeat.DOUBT_SECONDS", 0.2)


def beat(directory: RunDirectory, age: float) -> None:
    os.utime(directory.heartbeat_file, (time.time() - age,) * 2)


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within a time that is ample on a busy machine."""
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def step(writer: RunWriter, number: int, loss: float = 0.5, max_steps: int = 10) -> None:
    result = StepResult(step=number, loss=loss, grad_norm=1.0, learning_rate=1e-4, samples=8, seconds=0.1)
    Events(writer).write_step(RunState(max_steps=max_steps, step=number), result)


def end(writer: RunWriter, reason: StopReason) -> None:
    Events(writer).on_train_end(RunState(max_steps=10, step=3), Outcome(reason=reason, message="said why"))


# --- how a run fares ------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_has_never_started(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).status().condition == "never started"


def test_a_run_that_was_only_made_ready_has_never_started(tmp_path: Path) -> None:
    prepare(RunDirectory(tmp_path))
    assert RunDirectory(tmp_path).status().condition == "never started"


def test_a_run_is_running_while_its_process_lives(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        status = RunDirectory(tmp_path).status()
        assert (status.condition, f"process {child.pid} on " in status.message) == ("running", True)


def test_a_killed_run_has_failed_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        child.kill()
        child.wait()
        status = RunDirectory(tmp_path).status()
        assert (status.condition, status.exit_code) == ("failed", ExitCode.KILLED)
        assert status.message.endswith("died without reporting why")


def test_a_run_that_lives_but_gives_no_sign_is_stale(tmp_path: Path, soon: None) -> None:
    with running(tmp_path) as child:
        child.send_signal(signal.SIGSTOP)
        directory = RunDirectory(tmp_path)
        before = directory.status().condition
        assert eventually(lambda: directory.status().condition == "stale")
        assert before == "running"
        assert re.match(r"no heartbeat for \d+ s from process \d+ on ", directory.status().message)


def test_processes_are_read_as_earlier_versions_wrote_them(tmp_path: Path) -> None:
    with running(tmp_path):
        directory = RunDirectory(tmp_path)
        record, heartbeat = directory.record(), directory.heartbeat()
        for file in (directory.record_file, directory.heartbeat_file):
            old = file.read_text().replace('"pid_namespace"', '"space"').replace('"start_time"', '"birth"')
            file.write_text(old)
            assert '"space"' in old
        assert directory.record() == record
        found = directory.heartbeat()
        assert (found and found.process, directory.status().condition) == (heartbeat and heartbeat.process, "running")


SKEWS = (-1e9, -3600.0, -31.0, 0.0, 31.0, 3600.0, 1e9)


@pytest.mark.parametrize("skew", some(SKEWS, -1e9, -31.0, 0.0, 3600.0))
def test_a_run_on_another_host_is_judged_by_changes_of_its_heartbeat(tmp_path: Path, soon: None, skew: float) -> None:
    elsewhere(tmp_path, age=-skew)
    alive, dead = RunDirectory(tmp_path), RunDirectory(tmp_path)
    with beating(alive, skew):
        watch_doubtful([alive])
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            assert alive.status().condition == "running"
            time.sleep(0.005)
    assert eventually(lambda: dead.status().condition == "stale")


def test_one_look_waits_only_for_runs_whose_clock_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.heartbeat.DOUBT_SECONDS", 0.3)
    monkeypatch.setattr("smalti.rundir.directory.DOUBT_SECONDS", 0.3)
    elsewhere(tmp_path / "fresh", age=1)
    elsewhere(tmp_path / "old", age=10_000)
    fresh, old = RunDirectory(tmp_path / "fresh"), RunDirectory(tmp_path / "old")
    watch_doubtful([fresh, old])
    watched = fresh.heartbeat_watch.silence
    assert (fresh.status().condition, watched) == ("running", 0.0)
    assert old.status().condition == "stale"
    assert re.match(r"no heartbeat for 1\d{4} s from process", old.status().message)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_an_attempt_is_told_from_an_earlier_one_whatever_the_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    clock = time.time
    with acquire(RunDirectory(tmp_path)) as writer:
        step(writer, 3)
        end(writer, StopReason.REQUESTED)
    monkeypatch.setattr(time, "time", lambda: clock() + skew)
    with acquire(RunDirectory(tmp_path)) as writer:
        conditions = [RunDirectory(tmp_path).status().condition]
        end(writer, StopReason.COMPLETED)
        conditions.append(RunDirectory(tmp_path).status().condition)
    assert conditions == ["running", "finished"]


@pytest.mark.parametrize(
    ("reason", "condition", "code"),
    [
        (StopReason.COMPLETED, "finished", ExitCode.DONE),
        (StopReason.REQUESTED, "stopped", ExitCode.STOPPED),
        (StopReason.PREEMPTED, "stopped", ExitCode.PREEMPTED),
        (StopReason.INTERRUPTED, "stopped", ExitCode.INTERRUPTED),
        (StopReason.NON_FINITE, "failed", ExitCode.FAILED),
        (StopReason.FAULT, "failed", ExitCode.GPU_FAULT),
    ],
)
def test_the_last_word_tells_how_a_run_ended(tmp_path: Path, reason: StopReason, condition: str, code: ExitCode) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        step(writer, 3)
        end(writer, reason)
    status = RunDirectory(tmp_path).status()
    assert (status.condition, status.message, status.exit_code) == (condition, "said why", code)


@pytest.mark.parametrize(("error", "code"), [(ValueError("bad"), 1), (UserError("bad"), 2), (GpuFaultError("bad"), 5)])
def test_a_run_that_an_exception_ended_has_failed_with_it(tmp_path: Path, error: Exception, code: int) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        events = Events(writer)
        events.on_error(RunState(max_steps=10), error)
        events.on_train_end(RunState(max_steps=10), None)
    status = RunDirectory(tmp_path).status()
    assert (status.condition, status.message, status.exit_code) == ("failed", f"{type(error).__name__}: bad", code)


def test_a_run_that_leaves_without_a_last_word_has_failed(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        step(writer, 3)
    assert RunDirectory(tmp_path).status().condition == "failed"


def test_a_run_that_goes_on_is_running_whatever_its_last_attempt_came_to(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        end(writer, StopReason.COMPLETED)
    with acquire(RunDirectory(tmp_path)):
        assert RunDirectory(tmp_path).status().condition == "running"


def test_the_last_word_of_an_earlier_attempt_does_not_count_for_a_later_one(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        end(writer, StopReason.COMPLETED)
    before = RunDirectory(tmp_path).events_file.read_bytes()
    with running(tmp_path) as child:
        child.kill()
    RunDirectory(tmp_path).events_file.write_bytes(before)  # as if the second attempt had not got to say a word
    assert RunDirectory(tmp_path).status().condition == "failed"


def test_a_launch_that_fails_before_its_first_step_is_told_and_leaves_a_run_with_steps_as_it_was(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        writer.end_launch(ExitCode.PREFLIGHT, "no images")
    new = directory.status()
    with acquire(directory) as writer:
        writer.begin_training()
        step(writer, 3)
        end(writer, StopReason.COMPLETED)
    before = directory.record()
    with acquire(directory) as writer:
        writer.end_launch(ExitCode.USAGE, "another seed")
    assert (new.condition, new.message, new.exit_code) == ("failed", "no images", 3)
    assert (directory.status().condition, directory.record()) == ("finished", before)
    last = directory.latest("state")
    assert last is not None
    assert (last.text("state"), last.text("message")) == ("refused", "another seed")


def test_what_a_run_is_busy_with_is_told_with_how_far_it_is(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.phases.enter("encoding", total=50_000, unit="images")
        writer.phases.advance(1200)
        assert eventually(lambda: RunDirectory(tmp_path).phase() is not None)
        summary = RunDirectory(tmp_path).summary()
        assert summary is not None
        assert str(summary.phase) == "encoding 1,200/50,000 images"
        assert summary.seconds_remaining is not None
        step(writer, 1)
        assert RunDirectory(tmp_path).phase() is None


# --- who may be the run ---------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with running(tmp_path) as child, pytest.raises(InUseError, match=f"in use by a running process: process {child.pid} on"):
        acquire(RunDirectory(tmp_path))


def test_a_run_is_made_ready_only_where_no_run_lives(tmp_path: Path) -> None:
    with running(tmp_path), pytest.raises(UserError, match="smalti run stop"):
        prepare(RunDirectory(tmp_path))


def test_the_same_process_cannot_be_two_runs_in_one_place(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)), pytest.raises(UserError, match="in use"):
        acquire(RunDirectory(tmp_path))


def test_the_main_rank_keeps_others_out_when_the_process_that_launched_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as child:
        heartbeat = RunDirectory(tmp_path).heartbeat()
        assert heartbeat is not None
        monkeypatch.setenv(ATTEMPT_VARIABLE, repr(heartbeat.started))
        with join(RunDirectory(tmp_path)):
            child.kill()
            child.wait()
            with pytest.raises(InUseError, match=f"in use by a running process: process {os.getpid()} on"):
                acquire(RunDirectory(tmp_path))
    acquire(RunDirectory(tmp_path)).close()


def test_a_run_that_hangs_still_keeps_others_out(tmp_path: Path, soon: None) -> None:
    with running(tmp_path) as child:
        child.send_signal(signal.SIGSTOP)
        beat(RunDirectory(tmp_path), 1000)
        with pytest.raises(UserError, match=r"without a heartbeat for 1\d{3} s"):
            acquire(RunDirectory(tmp_path))


def test_the_place_of_a_killed_run_is_taken_over_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        child.kill()
        child.wait()
        with acquire(RunDirectory(tmp_path)) as writer:
            assert writer.record.process == Process.current()


@pytest.mark.parametrize("skew", [-600.0, 0.0, 600.0])
def test_the_place_of_a_run_that_fell_silent_on_another_host_is_taken_over(tmp_path: Path, soon: None, skew: float) -> None:
    elsewhere(tmp_path, age=-skew)
    begun = time.monotonic()
    with acquire(RunDirectory(tmp_path)):
        assert time.monotonic() - begun >= 0.4, "only a heartbeat that was watched says anything"
        assert RunDirectory(tmp_path).status().condition == "running"


@pytest.mark.parametrize("skew", [-1e9, -600.0, 0.0, 600.0, 1e9])
def test_a_run_on_another_host_that_lives_is_left_alone_whatever_its_clock(tmp_path: Path, soon: None, skew: float) -> None:
    elsewhere(tmp_path, age=-skew)
    directory = RunDirectory(tmp_path)
    with beating(directory, skew), pytest.raises(InUseError, match="on other-host"):
        acquire(RunDirectory(tmp_path))
    assert directory.heartbeat_file.exists()


_RACE = """
import sys, time
from pathlib import Path
from smalti.errors import UserError
from smalti.rundir import ownership
from smalti.rundir.writer import acquire
from smalti.rundir.directory import RunDirectory
ownership.STALE_SECONDS, ownership.POLL_SECONDS = 0.05, 0.02
start, won, held = float(sys.argv[2]), [], []
for number, path in enumerate(sorted(Path(sys.argv[1]).iterdir())):
    time.sleep(max(0.0, start + number * 0.12 - time.time() - 0.002))
    while time.time() < start + number * 0.12:
        pass
    try:
        held.append(acquire(RunDirectory(path)))
        won.append(number)
    except UserError:
        pass
print(*won, flush=True)
time.sleep(60)
"""


def test_of_several_runs_that_start_at_once_after_a_crash_one_gets_through(tmp_path: Path) -> None:
    races = 30
    for number in range(races):
        elsewhere(tmp_path / f"{number:02}", age=40)
    command = [sys.executable, "-c", _RACE, str(tmp_path), str(time.time() + 2)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    winners = []
    for child in children:
        assert child.stdout is not None
        winners += [int(word) for word in child.stdout.readline().split()]
    for child in children:
        child.kill()
        child.communicate()
    assert sorted(winners) == list(range(races))


def test_the_heartbeat_goes_on_during_a_long_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 0.02)
    with acquire(RunDirectory(tmp_path)):
        beat(RunDirectory(tmp_path), 1000)
        assert eventually(lambda: RunDirectory(tmp_path).heartbeat().touched > time.time() - 500)  # type: ignore[union-attr]


def test_a_heartbeat_that_somebody_removed_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.rundir.writer.BEAT_SECONDS", 0.02)
    with acquire(RunDirectory(tmp_path)):
        RunDirectory(tmp_path).heartbeat_file.unlink()
        assert eventually(RunDirectory(tmp_path).heartbeat_file.exists)


# --- what must not be lost ------------------------------------------------------------------------------------------


def test_a_run_keeps_its_id_and_name_over_all_attempts(tmp_path: Path) -> None:
    first = prepare(RunDirectory(tmp_path), name="cats", config_digest="a")
    with acquire(RunDirectory(tmp_path), config_digest="b", world_size=4) as writer:
        again = writer.record
    assert (again.id, again.name, again.created) == (first.id, "cats", first.created)
    assert RunDirectory(tmp_path).record() == again


def test_events_of_all_attempts_stay(tmp_path: Path) -> None:
    for number in (1, 2):
        with acquire(RunDirectory(tmp_path)) as writer:
            step(writer, number)
    assert [event.step for event in RunDirectory(tmp_path).events() if event.kind == "step"] == [1, 2]


def test_what_lies_in_the_directory_is_told_by_its_place_there(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    image = ValidationImage(prompt="a fox", seed=7, path=directory.samples_at(5) / "0.png")
    with acquire(directory) as writer:
        Events(writer).on_validation(ValidationResult(step=5, images=(image,), folder=directory.samples_at(5)))
        Events(writer).on_checkpoint(Checkpoint(step=5, path=directory.checkpoints / "step-5", size=10, seconds=0.5))
        Events(writer).on_checkpoint(Checkpoint(step=6, path=Path("/elsewhere/step-6"), size=10, seconds=0.5))
    _, sample, inside, outside = directory.events()
    assert sample.fields == {
        "overview": "samples/00000005",
        "images": [{"prompt": "a fox", "seed": 7, "path": "samples/00000005/0.png"}],
    }
    assert inside.fields == {"path": "checkpoints/step-5", "size": 10, "seconds": 0.5, "blocked": 0.0}
    assert outside.text("path") == "/elsewhere/step-6"


def test_a_step_is_told_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        step(writer, 3, loss=math.nan)
    event = RunDirectory(tmp_path).latest("step")
    assert event is not None
    assert (event.step, event.fields) == (
        3,
        {
            "max_steps": 10,
            "epoch": 0,
            "loss": "NaN",
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "samples": 8,
            "seconds": 0.1,
            "data_seconds": 0.0,
            "skipped": False,
        },
    )


# --- seeing a run ---------------------------------------------------------------------------------------------------


def test_following_a_run_ends_with_the_run(tmp_path: Path) -> None:
    writer = acquire(RunDirectory(tmp_path))

    def run() -> None:
        step(writer, 1)
        time.sleep(0.5)
        step(writer, 2)
        end(writer, StopReason.COMPLETED)
        writer.close()

    thread = threading.Thread(target=run)
    thread.start()
    seen = [(event.kind, event.step) for event in RunDirectory(tmp_path).events(follow=True)]
    thread.join()
    assert seen == [("state", None), ("step", 1), ("step", 2), ("state", 3)]


def test_a_summary_tells_where_the_run_stands(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        values = {"loss": 9.0, "smoothed_loss": 0.25, "samples": 8, "recent_samples_per_second": 80.0, "max_steps": 10}
        writer.events.append("step", step=4, **values)
        summary = RunDirectory(tmp_path).summary()
    assert summary is not None
    assert (summary.step, summary.max_steps, summary.loss) == (4, 10, 0.25)
    assert summary.samples_per_second == pytest.approx(80)
    assert summary.seconds_remaining == pytest.approx(0.6)


def test_speed_is_that_of_the_present_attempt(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.events.append("step", step=2, loss=0.5, samples=8, recent_samples_per_second=80.0, max_steps=10)
    acquire(RunDirectory(tmp_path)).close()
    summary = RunDirectory(tmp_path).summary()
    assert summary is not None
    assert (summary.step, summary.samples_per_second) == (2, None)


def test_runs_are_found_by_what_they_are_and_not_searched_inside(tmp_path: Path) -> None:
    for name in ("b", "a/deep", ".hidden", "a/deep/checkpoints/inner", "one/two/three"):
        prepare(RunDirectory(tmp_path / name))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text('{"program": "another"}')
    found = [directory.path.relative_to(tmp_path).as_posix() for directory in find_runs(tmp_path, depth=2)]
    assert found == ["a/deep", "b"]


def test_a_folder_that_cannot_be_used_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.json").write_text("{")
    prepare(RunDirectory(tmp_path / "b"))
    assert [directory.path.name for directory in find_runs(tmp_path)] == ["b"]
    assert "run.json is damaged" in caplog.text


def test_a_directory_of_another_run_at_the_same_place_is_left_to_that_one(tmp_path: Path) -> None:
    mine, other = tmp_path / "run", RunDirectory(tmp_path / "run")
    with acquire(RunDirectory(mine)) as writer:
        writer.begin_training()
        mine.rename(tmp_path / "moved")
        (tmp_path / "new").mkdir()
        prepare(RunDirectory(tmp_path / "new"))
        (tmp_path / "new").rename(mine)
        assert eventually(lambda: writer.ownership.lost)
    assert sorted(path.name for path in mine.iterdir()) == ["run.json"]
    assert other.record() != writer.record


def test_a_directory_that_cannot_be_made_again_is_made_as_soon_as_it_can(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "folder/run")
    with acquire(directory) as writer:
        writer.begin_training()
        step(writer, 1)
        (tmp_path / "folder").rename(tmp_path / "moved")
        (tmp_path / "folder").write_text("in its way")
        time.sleep(0.8)
        step(writer, 2)
        (tmp_path / "folder").unlink()
        assert eventually(lambda: [request.kind for request in writer.take_requests()] == ["save"])
    assert [event.step for event in directory.events() if event.kind == "step"] == [1, 2]
