"""Asking a run for something, and its answer."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from smalti.builtin.run_directory import Events
from smalti.errors import UserError
from smalti.rundir.directory import RunDirectory
from smalti.rundir.writer import ATTEMPT_VARIABLE, GROUP_VARIABLE, RunWriter, acquire, join, prepare
from smalti.types import Outcome, RunState, StopReason


def _acks(directory: RunDirectory) -> list[tuple[str, object, str]]:
    return [
        (event.text("request"), event.fields["accepted"], event.text("message"))
        for event in directory.events()
        if event.kind == "control_ack"
    ]


def test_requests_are_taken_once_and_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        asked = [directory.request(kind) for kind in ("save", "sample", "stop", "save")]
        taken = writer.take_requests()
        assert [request.id for request in taken] == [request.id for request in asked]
        assert writer.take_requests() == []


def test_details_reach_the_run(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        RunDirectory(tmp_path).request("stop", reason="preempted")
        (request,) = writer.take_requests()
        assert request.details == {"reason": "preempted"}


def test_the_answer_of_a_run_reaches_who_asked(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:

        def answer() -> None:
            while not (requests := writer.take_requests()):
                time.sleep(0.01)
            writer.acknowledge(requests[0], accepted=False, message="not now")

        thread = threading.Thread(target=answer)
        thread.start()
        event = directory.answer(directory.request("save"), timeout=10)
        thread.join()
    assert event is not None
    assert (event.fields["accepted"], event.text("message")) == (False, "not now")


def test_without_an_answer_the_wait_ends(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory):
        assert directory.answer(directory.request("save"), timeout=0.1) is None


def test_a_run_that_ends_answers_what_it_cannot_do_any_more(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        request = directory.request("save")
        Events(writer).on_train_end(RunState(max_steps=1), Outcome(reason=StopReason.COMPLETED, message=""))
    event = directory.answer(request, timeout=10)
    assert event is not None
    assert event.text("message") == "the run has ended"


def test_what_comes_at_the_end_of_the_main_rank_of_a_group_is_left_to_its_launcher(tmp_path: Path, monkeypatch) -> None:
    directory, stopped = RunDirectory(tmp_path), threading.Event()
    with acquire(directory, on_stop=stopped.set) as launcher:
        monkeypatch.setenv(ATTEMPT_VARIABLE, repr(launcher.record.started))
        monkeypatch.setenv(GROUP_VARIABLE, "{}")
        with join(directory) as main:
            main.begin_training()
            request = directory.request("stop")
        assert _acks(directory) == []
        launcher.begin_generation(2)
        assert stopped.wait(20)
    assert _acks(directory) == [(request.id, True, "stopping before the first step: there is nothing to save")]


def test_a_stop_that_somebody_asks_for_replaces_the_same_one_of_a_plugin(tmp_path: Path) -> None:
    directory, state = RunDirectory(tmp_path), RunState(max_steps=9, step=3)
    with acquire(directory) as writer:
        state.request_stop(StopReason.REQUESTED, "in order to start again")
        directory.request("stop")
        Events(writer)._answer(writer, state)
    assert (state.stop_reason, state.stop_message) == (StopReason.REQUESTED, "")


def test_a_request_to_a_run_that_died_does_not_stop_the_next_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    prepare(directory)
    directory.control.mkdir()
    (directory.control / "1.json").write_text('{"kind": "stop"}')
    with acquire(directory) as writer:
        assert writer.take_requests() == []
    assert _acks(directory) == [("1", False, "it was requested before this run started")]


@pytest.mark.parametrize("ended", [False, True])
def test_nothing_can_be_asked_of_a_run_that_is_not_there(tmp_path: Path, ended: bool) -> None:
    directory = RunDirectory(tmp_path)
    if ended:
        with acquire(directory) as writer:
            Events(writer).on_train_end(RunState(max_steps=1), Outcome(reason=StopReason.COMPLETED, message="trained 1 steps"))
    with pytest.raises(UserError, match="no running process to stop"):
        directory.request("stop")
    assert not directory.control.exists()


def test_a_program_that_writes_the_simplest_request_is_understood(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        RunDirectory(tmp_path).control.mkdir()
        (tmp_path / "control/from-elsewhere.json").write_text('{"kind": "save"}')
        (request,) = writer.take_requests()
        assert (request.id, request.kind, request.details) == ("from-elsewhere", "save", {})


def test_what_a_run_cannot_do_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        directory.control.mkdir()
        (tmp_path / "control/a.json").write_text('{"kind": "dance"}')
        assert writer.take_requests() == []
    assert _acks(directory) == [("a", False, "unknown request 'dance'")]


@pytest.mark.parametrize("content", ["", "[1]", '{"kind": 3}', '{"work": "of weeks"}'])
def test_a_file_that_is_no_request_stays_and_is_mentioned_once(tmp_path: Path, content: str) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        directory.control.mkdir()
        (tmp_path / "control/mine.json").write_text(content)
        assert [writer.take_requests(), writer.take_requests()] == [[], []]
    assert (tmp_path / "control/mine.json").read_text() == content
    assert [event.kind for event in directory.events()] == ["state", "warning"]


def test_a_request_is_never_seen_half_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory) as writer:
        stop = threading.Event()
        seen: list[str] = []

        def take(writer: RunWriter) -> None:
            while not stop.is_set():
                seen.extend(request.id for request in writer.take_requests())

        thread = threading.Thread(target=take, args=(writer,))
        thread.start()
        asked = [directory.request("save", note="x" * 5000).id for _ in range(50)]
        stop.set()
        thread.join()
        seen += [request.id for request in writer.take_requests()]
    assert seen == asked
    assert "warning" not in {event.kind for event in directory.events()}


def test_the_file_of_a_request_is_plain_json(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with acquire(directory):
        request = directory.request("sample", prompt="ein Füchslein")
        content = json.loads((directory.control / f"{request.id}.json").read_text())
        assert (content["kind"], content["details"]) == ("sample", {"prompt": "ein Füchslein"})
