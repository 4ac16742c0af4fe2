"""After how long without progress a rank hangs, who waits for whom, and what the flight recorder says."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from smalti import RunState, StopReason
from smalti.rundir import RunDirectory
from smalti.training.trainer import __file__ as TRAINER
from smalti_health.hangs.deadlines import Deadlines
from smalti_health.hangs.flight_recorder import Call, last_calls, sentence
from smalti_health.hangs.options import HangOptions
from smalti_health.hangs.rank_progress import OwnTime, RankProgress, described, standstill
from smalti_health.hangs.stacks import StackDumps
from smalti_health.hangs.stops import asked_since
from smalti_health.hangs.watch import waits_in

NOW = 10_000.0


def rank(phase="training", *, idle=0.0, waits=False, p95=1.0, **more):
    return RankProgress(phase=phase, since=NOW - 5000, active=NOW - idle, published=NOW, waits=waits, p95=p95, **more)


@pytest.mark.parametrize(
    ("phase", "p95", "given", "seconds"),
    [
        ("training", 1.0, {}, 60),
        ("training", 40.0, {}, 200),
        ("training", 40.0, {"training": 30}, 30),
        ("training", None, {}, 1800),
        ("training", None, {"first_step": 9}, 9),
        ("saving", 1.0, {}, 3600),
        ("encoding", None, {}, None),
        ("encoding", None, {"encoding": 7}, 7),
        ("saving", None, {"saving": 0}, None),
    ],
)
def test_the_deadline_of_a_phase(phase, p95, given, seconds):
    assert Deadlines(given).seconds(phase, p95=p95) == seconds


def test_deadlines_are_given_as_pairs_and_others_are_refused():
    options = HangOptions(phase_deadlines=("training=300", "saving=0", "first_step=2.5"))
    assert options.deadlines() == {"training": 300, "saving": 0, "first_step": 2.5}
    for wrong in ("train=3", "training", "training=-1", "training=soon"):
        with pytest.raises(ValidationError, match="is not"):
            HangOptions(phase_deadlines=(wrong,))


def test_a_rank_whose_clock_differs_is_late_only_when_its_record_does_not_change():
    def seen(ago: float, *, skew: float, at: float, own: OwnTime) -> float:
        """For how many seconds a rank has made no progress, by a record that it has published so long ago."""
        published = at - ago + skew
        record = RankProgress(phase="training", since=published, active=published - 5, published=published)
        return at - own.translate(0, record, at, at - NOW).active

    for skew in (-600, 0, 600):
        own = OwnTime(20)
        assert 5 <= seen(0, skew=skew, at=NOW, own=own) <= 25
        assert [seen(0, skew=skew, at=NOW + after, own=own) for after in (10, 20)] == [5, 5]
        assert [seen(ago, skew=skew, at=NOW + 20 + ago, own=own) for ago in (10, 20, 90)] == [15, 25, 95]
    assert seen(15, skew=0, at=NOW, own=OwnTime(20)) == 20, "clocks that agree say how old the first record is"


@pytest.mark.parametrize(
    ("ranks", "awaited", "hang"),
    [
        ({0: rank(idle=100, waits=True), 1: rank(idle=100)}, (1,), True),
        ({0: rank(idle=100, waits=True), 1: rank(idle=50)}, (1,), False),
        ({0: rank(idle=100, waits=True), 1: rank("saving", idle=3000)}, (1,), False),
        ({0: rank(idle=100, waits=True), 1: rank("encoding", idle=9000)}, (1,), False),
        ({0: rank(idle=100, waits=True), 1: rank(idle=100, waits=True)}, (), True),
        ({0: rank(idle=50, waits=True), 1: rank(idle=100, waits=True)}, (), False),
        ({0: rank(idle=100, waits=True)}, (1,), False),
        ({0: rank(idle=900), 1: rank("encoding", idle=10)}, (0, 1), False),
        ({0: rank(idle=100, waits=True), 1: rank(idle=100, p95=None)}, (1,), True),
        ({0: rank(idle=100, waits=True, p95=None), 1: rank(idle=100, p95=None)}, (1,), False),
        ({0: rank(idle=100, waits=True, p95=30.0), 1: rank(idle=100, p95=None)}, (1,), False),
    ],
)
def test_a_hang_is_what_no_awaited_rank_can_be_expected_to_end(ranks, awaited, hang):
    found = standstill(ranks, 2, Deadlines(), NOW)
    assert (found.awaited, found.hang) == (awaited, hang)


def test_the_sentence_says_who_waits_for_whom_and_what_that_one_does():
    ranks = {
        0: rank(idle=100, waits=True, place="all_reduce (x.py:1)"),
        1: rank("saving", idle=90, step=7),
        2: rank(idle=100, waits=True),
    }
    text = described(standstill(ranks, 3, Deadlines(), NOW), ranks, NOW, lambda number: "stopped" if number == 1 else "")
    assert text.startswith(
        "ranks 0, 2 wait in all_reduce (x.py:1), in phase training, for 100 s, for rank 1 (in phase saving since"
    )
    assert "without progress for 90 s" in text
    assert text.endswith("its process is stopped)")


def dump(*entries):
    """A dump in the format of torch 2.13 (version 2.10), with what is read of it and some of what is not."""
    return json.dumps(
        {
            "version": "2.10",
            "comm_lib_version": "",
            "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}},
            "entries": [
                {
                    "collective_seq_id": number,
                    "input_dtypes": ["Float"],
                    "input_sizes": [size],
                    "is_p2p": False,
                    "op_id": number,
                    "p2p_seq_id": 0,
                    "process_group": [group, "default_pg"],
                    "profiling_name": name,
                    "retired": state == "completed",
                    "state": state,
                    "time_created_ns": 1795434419257908642,
                }
                for group, number, name, size, state in entries
            ],
        }
    )


STARTED = ("0", 8, "nccl:all_reduce", [1024, 3], "started")
DONE = ("0", 7, "nccl:all_gather", [4], "completed")


@pytest.mark.parametrize(
    ("dumps", "words"),
    [
        (
            {0: dump(DONE, STARTED), 1: dump(DONE)},
            "(call 8 of group 0/default_pg, size 1024x3), which rank 1 has not joined (last call: 7)",
        ),
        ({0: dump(STARTED), 1: dump(DONE), 2: dump(STARTED), 3: dump(DONE)}, "ranks 0, 2 wait in nccl:all_reduce"),
        (
            {0: dump(STARTED), 1: dump(("0", 8, "nccl:broadcast", [4], "started"))},
            "in different calls 8 of group 0/default_pg: rank 0: nccl:all_reduce, rank 1: nccl:broadcast",
        ),
        (
            {0: dump(STARTED), 1: dump(("0", 8, "nccl:all_reduce", [1024, 4], "started"))},
            "with different sizes: 1024x3; 1024x4",
        ),
        ({0: dump(STARTED), 1: dump(STARTED)}, "all ranks are in nccl:all_reduce"),
        ({0: dump(STARTED)}, "rank 1 does not tell its last call"),
        ({0: dump(DONE), 1: dump(DONE)}, ""),
        ({0: "", 1: "no dump", 2: "[1]", 3: '{"entries": [{}]}'}, ""),
    ],
)
def test_the_flight_recorder_names_the_call_and_the_rank_that_has_not_joined_it(dumps, words):
    calls = {number: found for number, text in dumps.items() if (found := last_calls(text))}
    text = sentence(calls, max(2, len(dumps)))
    assert words in text if words else text == ""


@pytest.mark.parametrize(
    ("file", "ended", "waits"),
    [
        (f"{Path(torch.__file__).parent}/distributed/distributed_c10d.py", True, True),
        (f"{Path(torch.__file__).parent}/nn/modules/linear.py", False, True),
        (f"{Path(torch.__file__).parent}/nn/modules/linear.py", True, False),
        (TRAINER, False, True),
        ("/home/me/torch/distributed/model.py", False, False),
        ("/home/me/smalti/parallel/model.py", False, False),
    ],
)
def test_a_rank_waits_in_the_installed_torch_and_not_in_a_folder_of_that_name(file, ended, waits):
    assert waits_in(file, (Call(group="", number=1, name="", sizes="", ended=ended),)) is waits


def test_what_killed_processes_left_of_their_stacks_is_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("SMALTI_OUTCOME_DIR", raising=False)
    used = StackDumps(0)
    used.open()
    try:
        (living,) = tmp_path.iterdir()
        left, empty, new = (tmp_path / f"smalti-stacks-{name}" for name in ("left", "empty", "new"))
        for folder in (left, empty, new):
            folder.mkdir()
        (left / "stacks-0.txt").touch()
        for folder in (living, left, empty):
            os.utime(folder, (1, 1))
        other = StackDumps(0)
        other.open()
        (own,) = set(tmp_path.iterdir()) - {living, new}
        other.close()
        assert set(tmp_path.iterdir()) == {living, new}, own
    finally:
        used.close()
    assert set(tmp_path.iterdir()) == {new}


def test_a_run_that_has_made_all_its_steps_was_not_asked_to_stop_until_a_signal_comes(tmp_path):
    directory, state = RunDirectory(tmp_path), RunState(max_steps=4, step=4)
    state.request_stop(StopReason.COMPLETED, "trained 4 steps")
    assert asked_since(directory, state) is None
    state.request_stop(StopReason.PREEMPTED)
    assert asked_since(directory, state) >= 0
