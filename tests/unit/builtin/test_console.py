"""Progress for people: on the main rank, as lines or as a bar, with a speed and a remaining time that can be believed."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from smalti.builtin.console import Console, LineDisplay, Progress, duration, speed
from smalti.config.config import Config
from smalti.config.options import Schema
from smalti.rundir.events import SmoothedMetrics, Throughput, seconds_for
from smalti.types import Checkpoint, EvaluationResult, RunInfo, RunState, StepResult, ValidationImage, ValidationResult, World

_speeds = st.floats(0.001, 1000)


def _info(rank: int = 0) -> RunInfo:
    return RunInfo(
        id="run",
        directory=Path("out"),
        world=World(rank=rank, size=2),
        config=Config(schema=Schema(groups=()), groups={}),
        family="toy",
        strategy="DDP",
        parameters=1234,
        trainable=1000,
        effective_batch=8,
        timesteps="uniform",
        plugins=(),
    )


def _result(step: int, loss: float = 0.5, **more: float) -> StepResult:
    return StepResult(step=step, loss=loss, grad_norm=1.0, learning_rate=1e-4, samples=8, seconds=0.1, **more)


def _shown(console: Console, stream: io.StringIO, steps: int, rank: int = 0) -> list[str]:
    """The lines after a run of so many steps."""
    state = RunState(max_steps=steps)
    console.on_train_start(state, _info(rank))
    for step in range(1, steps + 1):
        console.on_step_end(state, _result(step))
    console.on_train_end()
    return stream.getvalue().splitlines()


def test_the_start_says_at_which_noise_levels_the_run_trains() -> None:
    stream = io.StringIO()
    Console(stream).on_train_start(RunState(max_steps=9), _info())
    assert "timesteps: uniform" in stream.getvalue().splitlines()


# --- speed ----------------------------------------------------------------------------------------------------------


def test_the_loss_on_held_out_pictures_is_told() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.on_train_start(RunState(max_steps=9), _info())
    console.on_evaluation(EvaluationResult(step=5, loss=0.25, by_timestep={500: 0.25}, samples=64, averaged=False, seconds=1.5))
    assert stream.getvalue().splitlines()[-1] == "evaluation of step 5: loss 0.25 over 64 held-out images (1.5 s)"
    masked = EvaluationResult(step=6, loss=0.5, by_timestep={}, samples=64, averaged=False, seconds=1.5, factors=("mask",))
    console.on_evaluation(masked)
    assert stream.getvalue().splitlines()[-1] == "evaluation of step 6: loss 0.5 times mask over 64 held-out images (1.5 s)"


def test_a_line_tells_what_is_known_of_the_devices() -> None:
    progress = Progress(step=0, max_steps=9, now=0.0)
    progress.update(_result(step=1, mfu=0.4128, peak_memory_mb=3 * 1024), 1.0)
    progress.update(_result(step=2), 2.0)
    assert "  mfu 41.3%  3.0 GiB  " in progress.line()


def test_nothing_is_known_before_the_first_step() -> None:
    assert Throughput().samples_per_second is None
    assert seconds_for(10, 4, None) is None


@given(seconds=_speeds, count=st.integers(1, 50))
def test_a_steady_run_has_its_exact_speed(seconds: float, count: int) -> None:
    rate = Throughput()
    for _ in range(count):
        rate.update(seconds=seconds, samples=4)
    assert rate.samples_per_second == pytest.approx(4 / seconds)
    assert seconds_for(10, 4, rate.samples_per_second) == pytest.approx(10 * seconds)


@given(times=st.lists(_speeds, min_size=3, max_size=20))
def test_the_speed_lies_between_the_slowest_and_the_fastest_step_after_the_first(times: list[float]) -> None:
    rate = Throughput()
    for seconds in times:
        rate.update(seconds=seconds, samples=1)
    assert rate.samples_per_second is not None
    assert 1 / max(times[1:]) * 0.999 <= rate.samples_per_second <= 1 / min(times[1:]) * 1.001


def test_a_slow_first_step_is_forgotten_with_the_second() -> None:
    rate = Throughput()
    rate.update(seconds=120, samples=1)
    rate.update(seconds=1, samples=1)
    assert rate.samples_per_second == pytest.approx(1)


def test_after_a_half_life_the_new_speed_weighs_as_much_as_the_old() -> None:
    rate = Throughput(half_life=10)
    for _ in range(1000):
        rate.update(seconds=1, samples=1)
    for _ in range(20):
        rate.update(seconds=0.5, samples=1)
    assert rate.samples_per_second == pytest.approx(1.5, rel=0.02)


# --- what is shown --------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_shown_and_does_not_spoil_the_next_ones() -> None:
    recent = SmoothedMetrics()
    assert repr([recent.update(loss, 1)[0] for loss in (0.5, math.nan, 0.5)]) == "[0.5, nan, 0.5]"


def test_the_loss_is_the_mean_of_about_twenty_steps() -> None:
    recent = SmoothedMetrics()
    shown = [recent.update(loss, 1)[0] for loss in [1.0] * 100 + [0.0] * 20]
    assert (shown[99], shown[-1]) == (pytest.approx(1), pytest.approx(0.95**20, rel=0.01))


def test_a_line_has_all_figures() -> None:
    progress = Progress(step=0, max_steps=100, now=0)
    for step in range(1, 11):
        progress.update(_result(step=step, smoothed_loss=0.25, recent_samples_per_second=4), step * 2)
    stream = io.StringIO()
    LineDisplay(stream).update(progress)
    assert stream.getvalue() == "step  10/100  loss 0.25     eta 0:03:00  4 samples/s  lr 1.00e-04  elapsed 0:00:20\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01"), (None, "-")])
def test_durations_are_hours_minutes_and_seconds(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (12345.6, "12,346"), (None, "-")])
def test_speeds_have_three_figures(rate: float | None, text: str) -> None:
    assert speed(rate) == text


def test_lines_come_for_the_first_step_then_now_and_then_and_for_the_last() -> None:
    now = 0.0
    stream = io.StringIO()
    display = LineDisplay(stream, seconds=10, clock=lambda: now)
    progress = Progress(step=0, max_steps=30, now=0)
    for step in range(1, 31):
        now = float(step)
        progress.update(_result(step=step), now)
        display.update(progress)
    display.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/30", "11/30", "21/30", "30/30"]


def test_a_run_that_stops_early_shows_its_last_step() -> None:
    stream = io.StringIO()
    console = Console(stream)
    state = RunState(max_steps=100)
    console.on_train_start(state, _info())
    for step in (1, 2, 3):
        console.on_step_end(state, _result(step))
    console.on_train_end()
    assert stream.getvalue().splitlines()[-1].startswith("step   3/100 ")


def test_a_run_introduces_itself() -> None:
    stream = io.StringIO()
    first, *_ = _shown(Console(stream), stream, steps=1)
    assert first == "toy on DDP, 2 ranks: 1,000 of 1,234 parameters trainable, 8 samples per step, steps 0 to 1"


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    assert _shown(Console(stream), stream, steps=3, rank=1) == []


def test_a_step_that_is_left_out_for_its_gradient_is_told_so() -> None:
    stream = io.StringIO()
    console = Console(stream)
    state = RunState(max_steps=100, step=5)
    console.on_train_start(state, _info())
    console.on_step_end(state, replace(_result(5, loss=1.0, skipped=True), grad_norm=math.nan))
    assert "step 6 was skipped: its gradient norm was nan" in stream.getvalue().splitlines()


def test_checkpoints_pictures_left_out_steps_and_errors_are_told() -> None:
    stream = io.StringIO()
    console = Console(stream)
    state = RunState(max_steps=100, step=5)
    console.on_train_start(state, _info())
    console.on_step_end(state, _result(5, loss=math.inf, skipped=True))
    console.on_checkpoint(Checkpoint(step=5, path=Path("out/step-5"), size=3 << 20, seconds=0.25))
    image = ValidationImage(prompt="a fox", seed=1, path=Path("out/a.png"))
    console.on_validation(ValidationResult(step=5, images=(image,), folder=Path("out")))
    console.on_error(state, ValueError("bad"))
    console.on_train_end()
    assert stream.getvalue().splitlines()[3:] == [
        "step 6 was skipped: its loss was inf",
        "checkpoint of step 5: out/step-5 (3.0 MiB in 0.2 s)",
        "1 image of step 5: out",
        "ValueError after step 5",
    ]


# --- the terminal ---------------------------------------------------------------------------------------------------

_SCRIPT = """
import sys
from smalti.builtin.console import Progress, open_display
from smalti.types import StepResult
display = open_display(sys.stderr)
progress = Progress(step=0, max_steps=3, now=0)
for step in (1, 2, 3):
    result = StepResult(
        step=step, loss=0.5, grad_norm=1, learning_rate=1e-4, samples=8, seconds=1, recent_samples_per_second=8
    )
    progress.update(result, step)
    display.update(progress)
display.print("checkpoint [1/2] written")
print("a result")
display.close()
print("rich" in sys.modules)
"""


def _on_a_terminal(**environment: str) -> tuple[str, str]:
    """What the script shows on a terminal, and what it prints elsewhere: a line, and whether rich was imported."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    return shown.decode(), child.communicate()[0].strip()


def test_a_terminal_gets_a_bar_that_ends_with_the_last_step() -> None:
    shown, _ = _on_a_terminal()
    assert "━" in shown
    assert "step 3/3" in shown.splitlines()[-2]  # the last line shows the cursor again
    assert "checkpoint [1/2] written" in shown


def test_a_narrow_terminal_still_shows_step_loss_and_remaining_time() -> None:
    shown, _ = _on_a_terminal(COLUMNS="50")
    assert "step 3/3  loss 0.5      eta 0:00:00" in shown.splitlines()[-2]


def test_what_goes_to_a_file_does_not_land_on_the_terminal() -> None:
    shown, printed = _on_a_terminal()
    assert "a result" not in shown
    assert printed == "a result\nTrue"


def test_no_color_is_honoured() -> None:
    coloured, _ = _on_a_terminal()
    plain, _ = _on_a_terminal(NO_COLOR="1")
    assert "\x1b[38;5;" in coloured
    assert "\x1b[38;5;" not in plain


def test_a_terminal_that_can_do_nothing_gets_lines() -> None:
    shown, printed = _on_a_terminal(TERM="dumb")
    assert shown.splitlines()[-1] == "checkpoint [1/2] written"
    assert printed == "a result\nFalse"
