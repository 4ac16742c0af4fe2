"""`smalti run`: what it shows and asks, with its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smalti.builtin.run_directory import Events
from smalti.cli.run import run
from smalti.errors import ExitCode, UserError
from smalti.rundir.directory import RunDirectory
from smalti.rundir.events import EventKind
from smalti.rundir.writer import acquire, prepare
from smalti.types import Outcome, RunState, StopReason

_RUN = """
import sys, time
from smalti.builtin.run_directory import Events
from smalti.rundir.writer import acquire
from smalti.rundir.directory import RunDirectory
from smalti.types import Outcome, RunState, StepResult, StopReason
state = RunState(max_steps=1000)
with acquire(RunDirectory(sys.argv[1])) as writer:
    for step in range(1, 1001):
        state.step = step
        loss = float("nan") if step == 2 else 0.5
        result = StepResult(step=step, loss=loss, grad_norm=1, learning_rate=1e-4, samples=8, seconds=0.02)
        Events(writer).write_step(state, result)
        print(step, flush=True)
        time.sleep(0.02)
        for request in writer.take_requests():
            if request.kind == "sample":
                writer.acknowledge(request, accepted=False, message="this run draws nothing")
            elif request.kind == "save":
                writer.acknowledge(request, message=f"saving after step {step}")
            else:
                writer.acknowledge(request, message=f"stopping after step {step}")
                state.request_stop(StopReason.INTERRUPTED, "it was asked to")
        if state.stop_reason:
            break
    Events(writer).on_train_end(state, Outcome(reason=state.stop_reason, message=state.stop_message))
"""


@contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that trains in `path` and has made two steps."""
    child = subprocess.Popen([sys.executable, "-c", _RUN, str(path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        try:
            yield child
        finally:
            child.kill()


def smalti_run(*arguments: object) -> Result:
    return CliRunner().invoke(run, [str(argument) for argument in arguments])


@contextmanager
def watching(path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from smalti.cli.run import run; run()", "watch", str(path), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


def test_runs_are_listed_with_how_they_fare(tmp_path: Path) -> None:
    prepare(RunDirectory(tmp_path / "idle"))
    with running(tmp_path / "busy"):
        lines = smalti_run("ls", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["run", "status", "step", "smoothed", "loss", "samples/s", "eta", "age", "goodput"]
    assert lines[1].split()[:2] == [str(tmp_path / "busy"), "running"]
    assert lines[1].split()[2].endswith("/1000")
    idle = lines[2].split()[1:]
    assert " ".join(idle[:6] + idle[7:]) == "never started 0/- - - - - prepared, but not started yet"


def test_the_listing_for_machines_is_strict_json(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path / "a")) as writer:
        writer.events.append("step", step=1, loss=float("nan"), max_steps=5)
    (row,) = json.loads(smalti_run("ls", tmp_path, "--json").stdout)
    assert (row["path"], row["step"], row["max_steps"], row["loss"]) == (str(tmp_path / "a"), 1, 5, "NaN")
    assert row["status"]["condition"] == "failed"


def test_runs_that_cannot_be_read_are_left_out_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("deep", "early", "good", "pipe", "pipe_beat", "pipe_events"):
        with acquire(RunDirectory(tmp_path / name)) as writer:
            writer.events.append("step", step=1, loss=1)
    (tmp_path / "deep/run.json").write_text("[" * 100_000)
    early = tmp_path / "early/run.json"
    early.write_text(json.dumps({**json.loads(early.read_text()), "started": -1e308}))
    for name in ("pipe/run.json", "pipe_beat/heartbeat", "pipe_events/events.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)

    result = smalti_run("ls", tmp_path, "--json")

    assert (result.exit_code, [row["path"] for row in json.loads(result.stdout)]) == (0, [str(tmp_path / "good")])
    skipped = [record.getMessage() for record in caplog.records]
    reasons = ["nested too deeply", "greater than or equal to 0", *["not a regular file"] * 3]
    assert len(skipped) == len(reasons)
    assert all(reason in message for reason, message in zip(reasons, skipped, strict=True)), skipped


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    result = smalti_run("ls", tmp_path)
    assert (result.stdout, result.stderr) == ("", f"no runs found below {tmp_path}\n")


def test_a_run_can_be_asked_to_stop_and_says_when_it_will(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        result = smalti_run("stop", tmp_path)
        assert result.stdout.startswith(f"{tmp_path}: stopping after step ")
        assert (result.exit_code, child.wait(60)) == (0, 0)


def test_a_refusal_is_an_error(tmp_path: Path) -> None:
    with running(tmp_path):
        result = smalti_run("sample", tmp_path)
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path}: refused: this run draws nothing\n")


def test_a_run_need_not_be_waited_for(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        result = smalti_run("save", tmp_path, "--no-wait")
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path}: requested to save\n")
        assert [request.kind for request in writer.take_requests()] == ["save"]


def test_a_run_that_does_not_answer_in_time_is_told_about(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)):
        result = smalti_run("save", tmp_path, "--timeout", "0.1")
    assert (result.exit_code, result.stderr) == (
        1,
        f"{tmp_path}: no answer to the request to save: none within 0.1 s; runs answer after a step\n",
    )


def test_the_answer_to_a_request_is_given_as_json(tmp_path: Path) -> None:
    with running(tmp_path):
        result = smalti_run("save", tmp_path, "--json")
        answer = json.loads(result.stdout)
        assert (result.exit_code, answer["kind"], answer["accepted"]) == (0, "save", True)
        assert answer["message"].startswith("saving after step ")
        result = smalti_run("sample", tmp_path, "--json")
        assert (result.exit_code, json.loads(result.stdout)["accepted"]) == (1, False)


def test_a_dead_run_is_not_asked_and_the_message_says_why(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        child.kill()
        child.wait()
    error = smalti_run("stop", tmp_path).exception
    assert isinstance(error, UserError)
    assert "no running process to stop: failed (process" in error.message


def test_watching_ends_with_the_run_and_with_its_exit_code(tmp_path: Path) -> None:
    with running(tmp_path), watching(tmp_path) as watcher:
        smalti_run("stop", tmp_path)
        stdout, stderr = watcher.communicate(timeout=60)
    assert (watcher.returncode, stderr) == (ExitCode.INTERRUPTED, f"{tmp_path}: stopped: it was asked to\n")
    assert "stop accepted: stopping after step " in stdout


def test_watching_a_run_that_has_ended_shows_where_it_came_to(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        for step in (1, 2):
            writer.events.append("step", step=step, max_steps=9, loss=0.5, samples=8, seconds=0.1, learning_rate=1e-4)
        Events(writer).on_train_end(RunState(max_steps=9, step=2), Outcome(reason=StopReason.PREEMPTED, message="preempted"))
    result = smalti_run("watch", tmp_path)
    assert result.stdout.startswith("step 2/9  loss 0.5 ")
    assert (result.stderr, result.exit_code) == (f"{tmp_path}: stopped: preempted\n", ExitCode.PREEMPTED)


def test_watching_does_not_repeat_what_was_before(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.events.append("checkpoint", step=1, path="checkpoints/step-1")
        writer.events.append("step", step=2, max_steps=9)
        writer.events.append("checkpoint", step=2, path="checkpoints/step-2")
    shown = smalti_run("watch", tmp_path).stdout
    assert "step-1" not in shown
    assert "step-2" in shown


def test_watching_a_killed_run_ends_with_an_error(tmp_path: Path) -> None:
    with running(tmp_path) as child, watching(tmp_path) as watcher:
        child.kill()
        child.wait()
        _, stderr = watcher.communicate(timeout=60)
    assert watcher.returncode == ExitCode.KILLED
    assert "died without reporting why" in stderr


def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path: Path) -> None:
    with running(tmp_path) as child, watching(tmp_path) as watcher:
        watcher.send_signal(signal.SIGINT)
        _, stderr = watcher.communicate(timeout=60)
        assert (watcher.returncode, child.poll()) == (130, None)
    assert stderr == f"stopped watching; the run continues. To stop it: smalti run stop {tmp_path}\n"


def test_events_are_passed_through_from_the_first_to_the_last(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.events.append("step", step=1, loss=float("inf"))
    result = smalti_run("watch", tmp_path, "--json")
    assert result.stdout == RunDirectory(tmp_path).events_file.read_text()


def test_passing_through_can_go_on_from_an_offset(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.events.append("step", step=1)
    first, second = RunDirectory(tmp_path).events()
    result = smalti_run("watch", tmp_path, "--json", "--offset", first.end)
    assert [json.loads(line)["step"] for line in result.stdout.splitlines()] == [second.step]


def test_a_run_that_never_starts_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    prepare(RunDirectory(tmp_path))
    result = smalti_run("watch", tmp_path, "--patience", "0.2")
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path}: never started: prepared, but not started yet\n")


def test_watching_where_no_run_is_says_what_is_waited_for_and_which_runs_there_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(RunDirectory(tmp_path / "runs" / "first"))
    (tmp_path / "photos").mkdir()
    result = smalti_run("watch", "runs/frist", "--patience", "0.2")
    told = "runs/frist: no run there yet; waiting 0.2 s, Ctrl-C ends; runs here: runs/first\n"
    assert (result.exit_code, result.stderr.startswith(told)) == (1, True)
    assert "photos: no run there yet" in smalti_run("watch", "photos", "--patience", "0.2").stderr
    (tmp_path / "photos" / "a.jpg").touch()
    refused = smalti_run("watch", "photos").exception
    assert isinstance(refused, UserError)
    assert refused.message == "photos is not a run directory"


def test_what_other_nodes_report_is_shown_too(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        writer.events.append("step", step=1, max_steps=9)
    directory.node_events_file(1).write_text('{"type": "health", "t": 1, "step": 1, "message": "GPU 3 is hot"}\n')
    assert "health: GPU 3 is hot\n" in smalti_run("watch", tmp_path).stdout


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("eval", {"loss": 0.5, "factors": ["mask"]}, "evaluation of step 1: loss 0.5 times mask on held-out images"),
        ("checkpoint", {"path": "checkpoints/step-1"}, "checkpoint of step 1: {}/checkpoints/step-1"),
        ("sample", {"overview": "samples/1/grid.png"}, "images of step 1: {}/samples/1/grid.png"),
        ("warning", {"message": "hm"}, "warning: hm"),
        ("error", {"error": "ValueError", "message": "bad"}, "error: ValueError: bad"),
        ("control_ack", {"kind": "save", "accepted": False, "message": "no"}, "save refused: no"),
    ],
)
def test_what_happens_is_told_in_words(tmp_path: Path, kind: EventKind, fields: dict[str, object], text: str) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        writer.events.append(kind, step=1, **fields)
    assert text.format(tmp_path) in smalti_run("watch", tmp_path).stdout.splitlines()
