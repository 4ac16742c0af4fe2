"""What the evaluations of a run say together."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from smalti import UserError
from smalti.rundir import RunDirectory, acquire
from smalti_validation.command import report, rising
from smalti_validation.history import History, table_of
from smalti_validation.learning import part_of
from smalti_validation.overfitting import read_report

NAMES = {7: "photos: a.png", 8: "photos: b.png", 9: "photos: c.png"}
LOSSES = {
    1: [[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]],
    2: [[0.5, 2.5], [0.6, 2.4], [0.4, 2.6]],
    3: [[0.6, 2.0], [0.7, 2.0], [0.5, 3.6]],
}
"""By step: images x noise levels. The first level overfits from step 2 on; the last image gets worse."""


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    with acquire(directory) as writer:
        history = History(directory, "this", 0)
        history.name_images(NAMES)
        for step, losses in LOSSES.items():
            history.add(step, float(np.mean(losses)), table_of([9, 7, 8], np.array(losses)[[2, 0, 1]]), None, keep=0)
        writer.events.append("eval", step=3, loss=1.0, by_timestep={"250": 0.6, "750": 2.5})
    return directory


def test_a_level_overfits_if_it_has_clearly_risen_since_its_best_step(run):
    first, second = read_report(run).levels
    assert (first.timestep, first.best, first.best_loss) == (250, 2, pytest.approx(0.5))
    assert (first.change.loss, first.change.interval, first.overfits) == (pytest.approx(0.1), pytest.approx(0, abs=1e-6), True)
    assert (second.timestep, second.best, second.change.loss) == (750, 2, pytest.approx(0.1 / 3))
    assert not second.overfits


def test_images_that_improved_least_come_first_by_their_names(run):
    found = read_report(run)
    assert [image.name[-5] for image in found.images] == ["c", "b", "a"]
    assert (found.worse, found.images[0].first, found.images[0].last) == (1, pytest.approx(2.0), pytest.approx(2.05))


def test_the_command_shows_both(run):
    output = CliRunner().invoke(report, [str(run.path)], catch_exceptions=False).output
    assert "3 held-out images, steps 1 to 3\n" in output
    assert "overfits" in next(line for line in output.splitlines() if line.strip().startswith("250"))
    assert "1 image of 3 with a higher loss than at step 1\n" in output
    content = json.loads(CliRunner().invoke(report, [str(run.path), "--json"], catch_exceptions=False).output)
    assert [level["overfits"] for level in content["levels"]] == [True, False]
    assert (content["worse"], len(content["images"])) == (1, 3)


def test_only_images_that_all_steps_have_are_compared(run):
    history = History(run, "this", 3)
    history.add(4, 1.0, table_of([7, 9], np.array([[0.5, 2.0], [0.5, 3.0]])), None, keep=0)
    assert [image.name[-5] for image in read_report(run).images] == ["c", "a"]


def test_what_an_evaluation_says_stands_at_the_training_images_around_the_same_noise(run):
    found = read_report(run)
    assert (part_of(0), part_of(250), part_of(1000), rising(found)) == (100, 300, 900, {300})


def test_a_run_without_evaluations_has_no_report(run, tmp_path):
    refused = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(refused.exception, UserError)
    assert "has neither an evaluation" in refused.exception.message
    (run.path / "evaluations" / "images.json").unlink()
    with pytest.raises(UserError, match=r"incomplete: .*images\.json"):
        read_report(run)
