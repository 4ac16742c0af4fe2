"""Long histories become a fixed number of points that hide no peak; a resumed run continues where it was resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given, strategies as st

from smalti.errors import ExitCode
from smalti.rundir import RunDirectory, acquire
from smalti_webui.runs.history import Histories, History
from smalti_webui.runs.sparkline import losses
from smalti_webui.runs.thinning import Series


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(1, 20), st.integers(1, 20))
def test_the_least_the_largest_and_the_mean_are_kept(values: list[float], limit: int, shown: int) -> None:
    series = Series(limit)
    for step, value in enumerate(values, start=1):
        series.add(step, float(step), value)
    columns = series.columns(shown)
    finite = [value for value in values if math.isfinite(value)]
    assert len(series.points) <= 2 * limit
    assert len(columns["step"]) <= 2 * shown
    assert columns["step"] == sorted(set(columns["step"]))  # type: ignore[type-var]
    assert sum(count for count in columns["count"] if count) == len(finite)
    assert columns["step"][-1:] == ([len(values)] if values else [])
    if finite:
        assert min(low for low in columns["low"] if low is not None) == float(f"{min(finite):.7g}")
        assert max(high for high in columns["high"] if high is not None) == float(f"{max(finite):.7g}")


def test_steps_that_are_made_again_replace_the_first_ones() -> None:
    series = Series(100)
    for step in [*range(1, 11), *range(6, 13)]:
        series.add(step, 0.0, float(step))
    assert series.columns(100)["step"] == list(range(1, 13))
    history = History()
    for step in range(1, 11):
        history.add({"type": "step", "t": float(step), "step": step, "loss": 1.0})
    history.add({"type": "state", "t": 20.0, "step": 4, "state": "running"})
    assert history.series["loss"].columns(100)["step"] == [1, 2, 3, 4]
    assert [(marker.kind, marker.step) for marker in history.markers] == [("resumed", 4)]


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    history = History()
    for step, loss in enumerate([1.0, "NaN", 3.0], start=1):
        history.add({"type": "step", "t": float(step), "step": step, "loss": loss})
    assert history.series["loss"].columns(100)["mean"] == [1.0, None, 3.0]


def test_the_loss_on_held_out_images_is_a_curve_by_noise_level_too() -> None:
    history = History()
    for levels in ({"100": 0.5, "900": "NaN", "x": None}, [1.0], None):
        history.add({"type": "eval", "t": 1.0, "step": 5, "loss": 0.25, "by_timestep": levels})
    assert history.series["eval_loss"].columns(9)["mean"] == [0.25]
    assert history.series["eval_loss/t=100"].columns(9)["mean"] == [0.5]
    assert history.series["eval_loss/t=900"].columns(9)["mean"] == [None]
    assert "eval_loss/t=x" not in history.series


def test_a_masked_loss_on_held_out_images_is_a_curve_of_its_own_beside_the_one_of_all_places() -> None:
    history = History()
    history.add(
        {
            "type": "eval",
            "t": 1.0,
            "step": 5,
            "loss": 0.5,
            "by_timestep": {"500": 0.5},
            "factors": ["mask"],
            "plain": {"500": 2},
        }
    )
    curves = {name: series.columns(9)["mean"] for name, series in history.series.items()}
    assert curves == {"eval_loss": [2.0], "eval_loss/t=500": [2.0], "eval_loss/mask": [0.5], "eval_loss/mask/t=500": [0.5]}


def test_a_history_is_continued_and_equals_one_that_is_read_at_once(tmp_path: Path) -> None:
    run, histories = RunDirectory(tmp_path / "run"), Histories()
    with acquire(run) as writer:
        for step in range(1, 3000):
            if step % 700 == 0:
                histories.of(run)
            writer.events.append("step", step=step, max_steps=3000, loss=math.sin(step), samples=1)
        writer.events.append("checkpoint", step=2999, path="checkpoints/step-2999", size=1)
        writer.end(2999, "failed", "it broke", ExitCode.FAILED)
    continued, fresh = histories.of(run).history, Histories().of(run).history
    assert continued.series["loss"].columns(500) == fresh.series["loss"].columns(500)
    assert continued.position == fresh.position
    assert fresh.position.offset == run.events_file.stat().st_size
    assert [marker.kind for marker in fresh.markers] == ["checkpoint"]
    assert [segment.phase for segment in fresh.segments] == ["starting", "training"]


def test_lines_that_are_not_events_do_no_harm(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    odd = [
        "[]",
        "3",
        "null",
        "{",
        '{"type": 5}',
        '{"type":"step"}',
        '{"type":"step","t":"x"}',
        '{"type":"step","t":1,"step":"a"}',
    ]
    odd += ['{"type":"checkpoint","t":1,"step":null,"path":{}}', '{"type":"phase","t":1,"phase":["a"]}', "[" * 5000]
    run.events_file.write_text("\n".join(odd) + "\n" + json.dumps({"type": "step", "t": 1, "step": 7, "loss": 0.5}) + "\n")
    history = Histories().of(run).history
    assert history.last_step["step"] == 7
    assert losses(run.events_file) == [(7, 0.5)]


def test_the_small_curve_of_a_long_run_reads_little_of_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = '{"type":"step","t":1.0,"step":%d,"loss":9.0,"smoothed_loss":%d,"pad":"%s"}\n'
    path.write_text("".join(text % (step, step, "x" * 200) for step in range(1, 20001)))
    found = losses(path, points=20)
    assert 15 <= len(found) <= 20
    assert found == sorted(found)
    assert found[0][0] < 100
    assert found[-1][0] == 20000


def test_the_seconds_of_phases_within_training_are_those_of_the_run() -> None:
    """A phase that continues after one within it is reported with its first beginning."""
    history = History()

    def add(kind: str, t: float, **fields: object) -> None:
        history.add({"type": kind, "t": t, "step": None, **fields})

    add("state", 100.0, state="starting")
    add("phase", 101.0, phase="encoding", begun=100.5)
    add("state", 110.0, state="running", step=0)
    add("phase", 110.5, phase="training", begun=110.0)
    add("step", 120.0, step=1, seconds=10.0, loss=1.0)
    add("phase", 121.0, phase="validating", begun=120.0)
    add("step", 121.5, step=1, seconds=9.0, loss=1.0)  # reported late: the step ended before the validation began
    add("phase", 130.0, phase="training", begun=110.0)
    add("step", 140.0, step=2, seconds=10.0, loss=1.0)
    add("phase", 141.0, phase="saving", begun=140.0)
    add("step", 155.0, step=3, seconds=10.0, loss=1.0)  # the next phase was not reported
    add("state", 156.0, state="finished", step=3)
    spent: dict[str, float] = {}
    for segment in history.segments:
        assert segment.end is not None
        spent[segment.phase] = spent.get(segment.phase, 0.0) + segment.end - segment.begin
    assert spent == {"starting": 0.5, "encoding": 9.5, "training": 31.0, "validating": 10.0, "saving": 5.0}
