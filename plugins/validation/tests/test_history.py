"""Which evaluations are the best, and when a loss has improved."""

import json

import numpy as np
import pytest

from smalti import CheckpointError
from smalti.rundir import RunDirectory
from smalti_validation.history import History, mean_change, table_of

NUMBERS = (7, 2**64 - 1, 9)


def table(*losses, images=NUMBERS):
    return table_of(images, np.array([[loss, loss + 0.5] for loss in losses]))


def opened(directory, begin=0, measured="this"):
    return History(RunDirectory(directory), measured, begin)


def add(history, step, *losses, keep=1):
    made = table(*losses)
    change = history.compare(made)
    history.add(step, float(np.mean(losses)) + 0.25, made, change, keep=keep)
    return change


def ranking(directory):
    return json.loads((directory / "checkpoints" / "ranking.json").read_text())["steps"]


@pytest.mark.parametrize(
    ("differences", "loss", "interval"),
    [
        ([1.0, 3.0], 2.0, 12.706),
        ([0.0, 1.0, 2.0, 3.0], 1.5, 3.182 * (5 / 12) ** 0.5),
        ([-1.0, 1.0] * 50, 0.0, 1.984 * (100 / 99) ** 0.5 / 10),
    ],
)
def test_the_interval_of_a_mean_is_that_of_students_t(differences, loss, interval):
    change = mean_change(np.array(differences), 5)
    assert (change.since, change.loss, change.interval) == (5, loss, pytest.approx(interval, rel=1e-3))


def test_of_one_image_there_is_no_interval_and_of_none_no_change():
    assert mean_change(np.array([-0.5]), 1).interval is None
    assert mean_change(np.array([-0.5]), 1).improves
    assert mean_change(np.array([]), 1) is None


def test_a_slow_improvement_counts_once_it_is_clear(tmp_path):
    history = opened(tmp_path)
    add(history, 1, 1.0, 2.0, 3.0)
    first = add(history, 2, 0.8, 2.0, 3.0)
    assert (first.improves, history.reference, history.since_reference) == (False, 1, 1)
    second = add(history, 3, 0.9, 1.9, 2.9)
    assert second.loss == pytest.approx(-0.1)
    assert (second.improves, history.reference, history.since_reference) == (True, 3, 0)


def test_images_that_cannot_be_read_any_more_are_not_compared(tmp_path):
    history = opened(tmp_path)
    add(history, 1, 1.0, 2.0, 3.0)
    assert history.compare(table(2.0, 5.0, images=(9, 7))).loss == pytest.approx(((2 - 3) + (5 - 1)) / 2)
    assert history.compare(table(2.0, images=(1,))) is None


def test_the_history_is_that_of_the_next_launch(tmp_path):
    add(opened(tmp_path), 1, 1.0, 2.0, 3.0)
    history = opened(tmp_path, begin=1)
    assert (1 in history, history.reference, history.loss(1)) == (True, 1, 2.25)
    assert add(history, 2, 0.5, 1.5, 2.5).improves
    assert ranking(tmp_path) == [2, 1]


def test_steps_that_a_resume_left_behind_are_ranked_and_not_waited_for(tmp_path):
    history = opened(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        add(history, step, loss, loss, loss)
    history = opened(tmp_path, begin=1)
    assert (history.reference, history.since_reference, 2 in history) == (1, 0, False)
    add(history, 3, 2.5, 2.5, 2.5)
    assert (history.reference, ranking(tmp_path)) == (3, [2, 3, 1])


def test_a_loss_that_is_not_finite_is_no_improvement_and_not_ranked(tmp_path):
    history = opened(tmp_path)
    add(history, 1, 1.0, 1.0, 1.0)
    history.add(2, float("nan"), table(float("nan"), 1.0, 1.0), None, keep=1)
    assert (history.reference, history.since_reference, ranking(tmp_path)) == (1, 1, [1])


def test_what_was_measured_otherwise_is_not_compared(tmp_path, caplog):
    add(opened(tmp_path), 1, 1.0, 2.0, 3.0)
    history = opened(tmp_path, begin=1, measured="something else")
    assert history.reference is None
    assert "starts over" in caplog.text


def test_without_the_table_of_the_reference_the_comparison_begins_anew(tmp_path, caplog):
    add(opened(tmp_path), 1, 1.0, 2.0, 3.0)
    (tmp_path / "evaluations" / "00000001.npy").unlink()
    history = opened(tmp_path, begin=1)
    assert add(history, 2, 1.0, 2.0, 3.0) is None
    assert history.reference == 2
    assert "00000001.npy is missing" in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", '{"evaluations": {"x": {}}, "measured": "this"}', '{"evaluations": {"1": 1}}'])
def test_a_damaged_history_is_refused(tmp_path, content):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ranking.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"ranking\.json is damaged"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"x" * 300])
def test_a_damaged_table_is_refused(tmp_path, content):
    add(opened(tmp_path), 1, 1.0, 2.0, 3.0)
    (tmp_path / "evaluations" / "00000001.npy").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"00000001\.npy is damaged"):
        opened(tmp_path, begin=1).compare(table(1.0, 2.0, 3.0))
