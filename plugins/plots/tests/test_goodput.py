"""What the time of a run was spent on, over attempts that end in every way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies

from smalti import ExitCode, Outcome, RunState, StepResult, StopReason
from smalti.builtin.run_directory import Events
from smalti.cli.entry import smalti
from smalti.rundir import Event, RunDirectory, RunWriter, acquire, read_events
from smalti_plots.goodput import KINDS, Goodput, Lost, TimeAccount, before_attempt, goodput_of, read_goodput
from smalti_plots.time_plugin import GoodputCounter


class History:
    """The events of a run, whose steps take 2 s and wait 1 s for their data. Between attempts it waits for 100 s."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 1000.0
        self.sums = Goodput()
        self.step = 0

    def add(self, kind: str, **fields: object) -> None:
        self.events.append(Event(kind=kind, time=self.now, step=self.step, fields=fields, offset=0, end=0))

    def spend(self, kind: str, seconds: float) -> None:
        self.now += seconds
        spent = {**self.sums.seconds, kind: self.sums.seconds.get(kind, 0.0) + seconds}
        self.sums = Goodput(seconds=spent, causes=self.sums.causes)

    def attempt(self, resumed: int, last: int, code: int | None, log_interval: int = 1) -> None:
        """Train from the step `resumed` to `last`; `code` None: killed."""
        self.now += 100
        self.add("state", state="starting")
        self.now += 10
        self.step = resumed
        self.sums = before_attempt(iter(self.events[::-1]), resumed, self.now)
        self.add("state", state="running", time=self.sums.as_fields())
        while self.step < last:
            self.spend("data", 1)
            self.spend("training", 2)
            self.step += 1
            if self.step % log_interval == 0:
                self.add("step", time=self.sums.as_fields())
        if code is not None:
            self.add("state", state="failed", exit_code=code, time=self.sums.as_fields())


def test_a_run_that_was_killed_lost_what_it_makes_again() -> None:
    history = History()
    history.attempt(0, 7, None)
    history.attempt(4, 10, 0)
    seconds = history.sums.seconds
    assert seconds == {"training": 20, "data": 10, "starting": 20, "restarting": 100, "lost": 9}
    assert history.sums.causes == {"killed": Lost(attempts=1, steps=3, seconds=9, restarting=100)}
    assert history.sums.share == pytest.approx(20 / 159)
    assert str(history.sums).startswith("13% of 2m39s training, 63% restarting, ")
    assert str(history.sums).endswith("3 steps were made again")


def test_the_time_until_somebody_goes_on_is_not_that_of_the_run() -> None:
    history = History()
    history.attempt(0, 5, int(ExitCode.STOPPED))
    history.attempt(5, 8, int(ExitCode.INTERRUPTED))
    history.attempt(8, 9, 0)
    assert history.sums.seconds == {"training": 18, "data": 9, "starting": 30}
    assert history.sums.causes == {}


def test_a_launch_that_did_not_train_is_not_the_cause() -> None:
    history = History()
    history.attempt(0, 5, int(ExitCode.PREEMPTED))
    history.add("state", state="starting")
    history.add("state", state="failed", exit_code=int(ExitCode.PREFLIGHT))
    history.attempt(5, 6, 0)
    assert history.sums.causes == {"preempted": Lost(attempts=1, restarting=100)}


def test_the_fault_of_an_accelerator_is_named() -> None:
    history = History()
    history.attempt(0, 5, None)
    history.add("health", fault="ecc")
    history.add("state", state="failed", exit_code=int(ExitCode.GPU_FAULT), time=history.sums.as_fields())
    history.attempt(3, 6, 0)
    assert list(history.sums.causes) == ["gpu_fault: ecc"]


def test_steps_that_were_lost_before_are_not_lost_again() -> None:
    history = History()
    history.attempt(0, 10, None)
    history.attempt(6, 8, None)
    history.attempt(4, 12, 0)  # steps 5 and 6 of the first attempt, 7 and 8 of the second
    assert history.sums.causes["killed"].steps == 4 + 4
    assert history.sums.seconds["training"] == 12 * 2


@settings(deadline=None, max_examples=100)
@given(strategies.lists(strategies.tuples(strategies.integers(0, 30), strategies.integers(1, 12)), min_size=1, max_size=6))
def test_what_counts_is_each_step_once(attempts: list[tuple[int, int]]) -> None:
    """Whatever an attempt resumes from, all time of all attempts is somewhere, and training is that of the steps that count."""
    history, last, made = History(), 0, 0
    for resumed, count in attempts:
        begin = min(resumed, last)
        history.attempt(begin, begin + count, None)
        last, made = begin + count, made + count
    seconds = history.sums.seconds
    assert seconds["training"] == pytest.approx(2 * last)
    assert seconds["data"] == pytest.approx(last)
    assert seconds.get("lost", 0.0) == pytest.approx(3 * (made - last))
    assert sum(lost.steps for lost in history.sums.causes.values()) == made - last
    assert history.sums.total == pytest.approx(3 * made + 10 * len(attempts) + 100 * (len(attempts) - 1))


def test_between_logged_steps_the_lost_part_is_a_share() -> None:
    history = History()
    history.attempt(0, 10, None, log_interval=5)
    history.attempt(6, 10, None)
    assert history.sums.causes["killed"].steps == 4
    assert history.sums.seconds["lost"] == pytest.approx(12)


def test_the_sums_survive_their_way_through_an_event() -> None:
    sums = Goodput(seconds={kind: number + 0.5 for number, kind in enumerate(KINDS)}, causes={"killed": Lost(steps=3)})
    fields = json.loads(json.dumps({"time": sums.as_fields()}))
    assert goodput_of(Event(kind="step", time=0.0, step=1, fields=fields, offset=0, end=0)) == sums


@pytest.mark.parametrize("value", [None, 5, {"training": "much"}, {"causes": {"killed": {"more": 1}}}])
def test_what_another_version_has_written_is_left_out(value: object) -> None:
    assert goodput_of(Event(kind="step", time=0.0, step=1, fields={"time": value}, offset=0, end=0)) is None


# --- counting -------------------------------------------------------------------------------------------------------


def test_phases_steps_and_what_is_neither_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount(Goodput())

    def passes(seconds: float) -> None:
        now[0] += seconds

    account.enter("compiling")
    passes(30)
    account.enter("training")
    account.step(29, 1, skipped=False)
    passes(5)
    account.step(4, 0.5, skipped=False)
    passes(2)
    account.step(2, 0, skipped=True)
    account.enter("saving")
    passes(3)
    account.enter("training")
    passes(4)
    account.step(4, 0, skipped=False)
    account.saved(4.5)  # 1.5 s of the step were spent waiting for it
    account.enter("validating")
    passes(7)
    assert account.now().seconds == {
        "training": 6.5,
        "data": 1.5,
        "validation": 7,
        "saving": 4.5,
        "starting": 29,
        "skipped": 2,
        "other": 0.5,
    }


def test_a_step_that_fails_is_lost_with_the_wait_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount(Goodput())
    account.enter("training")
    now[0] = 3.0
    account.step(3, 0, skipped=False)
    now[0] = 25.0
    account.fail()
    assert account.now().seconds == {"training": 3, "lost": 22}


def train(writer: RunWriter, begin: int, last: int, outcome: Outcome | None = None) -> None:
    """Steps of a quarter of a second, and the end if there is an outcome."""
    counter, events = GoodputCounter(), Events(writer)
    counter.on_rank_start(SimpleNamespace(writer=writer))
    writer.events.append("state", step=begin, state="running")
    state = RunState(max_steps=10, step=begin)
    for number in range(begin + 1, last + 1):
        result = StepResult(step=number, loss=0.5, grad_norm=1.0, learning_rate=1e-4, samples=8, seconds=0.25)
        counter.on_step_end(result)
        events.write_step(state, result)
    if outcome is not None:
        events.on_train_end(state, outcome)
    counter.on_rank_end()


def test_hook_describe_run_has_the_goodput_of_a_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    [unknown] = GoodputCounter().describe_run(directory)
    assert (unknown.name, unknown.text, unknown.value) == ("goodput", "-", None)
    with acquire(directory) as writer:
        train(writer, 0, 3)
    with acquire(directory) as writer:
        train(writer, 1, 4, Outcome(reason=StopReason.COMPLETED, message="done"))
    found = read_goodput(directory)
    assert found is not None
    assert found.seconds["training"] == pytest.approx(1.0)
    assert found.causes["killed"].steps == 2
    [value] = GoodputCounter().describe_run(directory)
    assert (value.text, value.value) == (f"{found.share:.0%}", found.as_json())
    assert GoodputCounter().on_launch_end(directory, ExitCode.DONE) == [f"time         {found}"]
    assert GoodputCounter().on_launch_end(directory, ExitCode.TAKEN_OVER) == []
    assert writer.events.extras == []


def test_the_sums_are_in_steps_and_states_of_the_loop_only(tmp_path: Path) -> None:
    with acquire(RunDirectory(tmp_path)) as writer:
        train(writer, 0, 2, Outcome(reason=StopReason.COMPLETED, message="done"))
        writer.events.append("warning", message="after")
    counted = [(event.kind, event.text("state")) for event in read_events(writer.events.path) if "time" in event.fields]
    assert counted == [("state", "running"), ("step", ""), ("step", ""), ("state", "finished")]


def test_the_command_says_what_the_time_was_spent_on(tmp_path: Path) -> None:
    def goodput(*options: str) -> str:
        result = CliRunner().invoke(smalti, ["run", "goodput", str(tmp_path), *options])
        return result.output or str(result.exception)

    assert "whose time was counted" in goodput()
    with acquire(RunDirectory(tmp_path)) as writer:
        train(writer, 0, 3)
    with acquire(RunDirectory(tmp_path)) as writer:
        train(writer, 1, 4)
    assert goodput().splitlines()[1].split()[0] == "training"
    assert "killed" in goodput()
    assert json.loads(goodput("--json"))["causes"]["killed"]["steps"] == 2
    (row,) = json.loads(CliRunner().invoke(smalti, ["run", "ls", str(tmp_path), "--json"]).output)
    assert row["goodput"]["seconds"]["training"] == pytest.approx(1.0)
