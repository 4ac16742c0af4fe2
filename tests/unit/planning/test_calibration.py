"""Real steps narrow the ranges of times, are kept, and leave nothing behind."""

import math
from dataclasses import replace

import pytest
from PIL import Image

from smalti import World
from smalti.errors import UserError
from smalti.planning import calibrate, calibration_of, choices
from support.planned import H100, MODEL, RUN, WHOLE

CHOICE = choices(MODEL, RUN, [WHOLE], H100, World(size=8, local_size=8, device="cuda"))[0]
CPU = replace(H100, name="cpu", title="a processor", kind="cpu")


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_measured_steps_set_the_middle_of_the_range_and_are_kept(tmp_path):
    for number in range(4):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    arguments = [
        *("--model_family=toy", "--toy_width=12", "--toy_depth=1", "--resolution=8", "--use_cpu", "--mixed_precision=no"),
        *(f"--instance_data_dir={tmp_path / 'images'}", "--caption_strategy=filename", f"--output_dir={tmp_path / 'own'}"),
    ]
    found = calibrate(arguments, CHOICE, CPU, "fp32")
    assert calibration_of(CPU, "fp32") == found
    assert calibration_of(CPU, "bf16") is None
    assert 0 < found.seconds < 60
    assert not (tmp_path / "own").exists()
    narrowed = found.apply(CHOICE)
    assert narrowed.seconds == pytest.approx(found.seconds)
    assert narrowed.slowest.seconds / narrowed.fastest.seconds < CHOICE.slowest.seconds / CHOICE.fastest.seconds
    assert math.isclose(sum(narrowed.slowest.parts.values()), narrowed.slowest.seconds)


def test_a_run_that_does_not_train_is_reported_with_the_end_of_its_output():
    with pytest.raises(UserError, match="Unknown model_family 'nothing'"):
        calibrate(["--model_family=nothing"], CHOICE, CPU, "fp32")
    assert calibration_of(CPU, "fp32") is None
