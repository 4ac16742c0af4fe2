"""The loss plot: what is on it, and that it never fails for want of nice numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from smalti.errors import UserError
from smalti.rundir.events import Event, EventWriter, read_events
from smalti_plots.loss import MAX_POINTS, Curve, History, plot_losses


def _event(kind: str, step: int | None, **fields: object) -> Event:
    return Event(kind=kind, time=0.0, step=step, fields=fields, offset=0, end=0)


def _steps(*losses: object, first: int = 1) -> list[Event]:
    return [_event("step", first + number, loss=loss, learning_rate=1e-4) for number, loss in enumerate(losses)]


def _reddish(path: Path) -> int:
    """How many pixels have the colour of the marks for losses that were not finite."""
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 24) or []
    return sum(count for count, colour in colours if isinstance(colour, tuple) and colour[0] > 150 > 90 > colour[1])


def test_a_plot_is_made_from_the_events_file_alone(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    for step in range(1, 30):
        writer.append("step", step=step, loss=1 / step, learning_rate=1e-4)
    writer.close()
    plot_losses(read_events(tmp_path / "events.jsonl"), tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1200, 720)


@pytest.mark.parametrize(
    "losses",
    [(0.5,), (0.0,), ("NaN",), ("Infinity", "NaN"), (None,), (0.0, 0.0, 0.0), (-1.0, 1.0), (1e-38, 3e38), (1e30, 1.0)],
    ids=repr,
)
def test_a_plot_is_made_whatever_the_losses_are(tmp_path: Path, losses: tuple[object, ...]) -> None:
    plot_losses(_steps(*losses), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_the_title_has_the_smoothed_loss_that_the_console_has_shown(tmp_path: Path) -> None:
    logged = _event("step", 3, loss=0.2, smoothed_loss=0.4321, learning_rate=1e-4)
    plot_losses([*_steps(0.5, 0.4), logged, *_steps(0.1, first=4)], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.info["Description"] == "step 4   smoothed loss 0.4321"


def test_the_loss_on_held_out_images_is_kept_by_step_and_forgotten_when_a_run_goes_back() -> None:
    told = [*_steps(0.5, 0.4), _event("eval", 2, loss=0.7), *_steps(0.3, first=3), _event("eval", 3, loss=0.6)]
    assert History.of(told).evaluations == {2: 0.7, 3: 0.6}
    assert History.of([*told, *_steps(0.3, first=3)]).evaluations == {2: 0.7}


def test_losses_on_held_out_images_are_drawn(tmp_path: Path) -> None:
    def drawn(*more: Event) -> bytes:
        plot_losses([*_steps(0.5, 0.4, 0.3), *more], tmp_path / "loss.png")
        with Image.open(tmp_path / "loss.png") as image:
            return image.tobytes()

    assert drawn(_event("eval", 2, loss=0.35)) != drawn()


def test_losses_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    plot_losses(_steps(0.5, 0.4, 0.3), tmp_path / "good.png")
    plot_losses(_steps(0.5, "NaN", 0.3), tmp_path / "bad.png")
    assert _reddish(tmp_path / "good.png") == 0
    assert _reddish(tmp_path / "bad.png") > 20


def test_without_a_step_there_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not made a step"):
        plot_losses([_event("state", 0), _event("checkpoint", 5)], tmp_path / "loss.png")


def test_steps_that_were_lost_when_the_run_went_back_are_not_shown() -> None:
    events = [*_steps(1.0, 2.0, 3.0, 4.0), _event("checkpoint", 2), _event("sample", 4), *_steps(7.0, first=3)]
    history = History.of(events)
    assert (history.steps, history.losses) == ([1, 2, 3], [1.0, 2.0, 7.0])
    assert (history.checkpoints, history.validations) == ([2], [])


@given(losses=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3 * MAX_POINTS))
def test_thinning_keeps_the_extremes_and_the_number_of_points_small(losses: list[float]) -> None:
    curve = Curve.of(list(range(len(losses))), losses)
    assert (min(curve.lows), max(curve.highs)) == (min(losses), max(losses))
    assert len(curve.means) <= MAX_POINTS


@given(losses=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_smoothed_curve_stays_between_the_extremes(losses: list[float]) -> None:
    smooth = Curve.of(list(range(len(losses))), losses).smoothed()
    assert min(losses) - 1e-3 <= min(smooth)
    assert max(smooth) <= max(losses) + 1e-3


def test_smoothing_leaves_a_straight_line_where_it_is() -> None:
    line = [float(step) for step in range(400)]
    smooth = Curve.of(list(range(400)), line).smoothed()
    assert smooth[200] == pytest.approx(200, abs=0.5)


def test_a_thinned_series_leaves_out_what_is_not_finite() -> None:
    curve = Curve.of([1, 2, 3], [1.0, math.nan, 3.0])
    assert (curve.steps, curve.means) == ([1.0, 3.0], [1.0, 3.0])
