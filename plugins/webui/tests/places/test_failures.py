"""How attempts ended: causes, fixes, and runs that could not say it."""

from __future__ import annotations

import json
from collections.abc import Callable

from smalti import ExitCode
from smalti.rundir import RunDirectory
from smalti_webui.places.outcome.failures import MEANINGS, attempts, hangs, split_fix

MakeRun = Callable[..., RunDirectory]


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_a_failed_attempt_names_its_cause_with_the_traceback(make_run: MakeRun) -> None:
    found = attempts(make_run(condition="failed", message="the loss is NaN"))

    assert len(found) == 1
    assert found[0].failed
    assert found[0].exit_code == ExitCode.FAILED
    assert found[0].cause is not None
    assert found[0].cause.message == "ValueError: the loss is NaN"
    assert found[0].cause.traceback.startswith("Traceback")


def test_a_finished_attempt_has_not_failed(make_run: MakeRun) -> None:
    found = attempts(make_run())

    assert [(each.failed, each.condition, each.reports) for each in found] == [(False, "finished", ())]


def test_a_run_that_was_killed_has_the_status_of_its_processes(make_run: MakeRun) -> None:
    run = make_run(condition="running")
    heartbeat = json.loads(run.heartbeat_file.read_text())
    heartbeat["process"]["start_time"] = "1"  # a process that is gone
    copy = RunDirectory(run.path.with_name("copy"))
    copy.path.mkdir()
    copy.record_file.write_bytes(run.record_file.read_bytes())
    copy.events_file.write_bytes(run.events_file.read_bytes())
    copy.heartbeat_file.write_text(json.dumps(heartbeat))

    found = attempts(copy)

    assert found[0].failed
    assert found[0].exit_code == ExitCode.KILLED
    assert "died without reporting why" in found[0].message


def test_faults_of_other_nodes_come_in_the_order_of_time(make_run: MakeRun) -> None:
    run = make_run(condition="failed", message="lost")
    error = next(event for event in run.events() if event.kind == "error")
    fault = {"type": "health", "t": error.time - 0.001, "step": 20, "fault": "ecc", "node": 1, "rank": 9, "message": "memory"}
    run.node_events_file(1).write_text(json.dumps(fault) + "\n")

    found = attempts(run)[0]

    assert [each.kind for each in found.reports] == ["health", "error"]
    assert found.cause is not None
    assert (found.cause.who, found.cause.message) == ("rank 9, node 1", "ecc: memory")


def test_the_fix_of_a_message_is_separate() -> None:
    assert split_fix("4 samples cannot be used: \n    a.png\n  fix: remove them") == (
        "4 samples cannot be used: \n    a.png",
        "remove them",
    )
    assert split_fix("no fix here") == ("no fix here", "")


def test_stacks_of_hangs_are_those_of_the_run_itself(make_run: MakeRun) -> None:
    run = make_run()
    (run.path / "hangs").mkdir()
    (run.path / "hangs" / "rank-0.txt").write_text("in all_reduce")
    (run.path / "hangs" / "link.txt").symlink_to("/etc/passwd")

    assert [(each.name, each.text) for each in hangs(run)] == [("rank-0.txt", "in all_reduce")]
