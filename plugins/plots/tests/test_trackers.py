"""Which trackers a run starts."""

from importlib.util import find_spec
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from smalti.config import Config, resolve
from smalti.errors import ConfigError
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.types import ValidationImage, ValidationResult, World
from smalti_plots.tracker_options import KNOWN, TrackerOptions, tracker_names
from smalti_plots.trackers import Trackers, plugin


def options(*names: str) -> TrackerOptions:
    return TrackerOptions.model_validate({"report_to": names})


def configure(*flags: str, without: tuple[str, ...] = ()) -> Config:
    return resolve(schema_of(load_plugins(Selection(without=without))), flags, environment={})


def test_all_are_those_whose_package_is_installed_each_once():
    installed = [name for name in KNOWN if find_spec(name) is not None]
    assert installed
    assert tracker_names(options("all", installed[0])) == installed


@pytest.mark.parametrize("words", [("none",), ()])
def test_none_starts_none(words):
    assert tracker_names(options(*words)) == []


def test_all_is_no_unknown_tracker():
    assert plugin.check_config(configure("--report_to=all")) == []
    (problem,) = plugin.check_config(configure("--report_to=al"))
    assert "unknown tracker 'al'" in problem.message


def test_tensorboard_has_validation_images_beside_those_of_the_model_before_training(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, colour in (("base", "red"), ("fox", "blue")):
        Image.new("RGB", (8, 4), colour).save(tmp_path / f"{name}.png")
    trackers = Trackers()
    config = configure("--report_to=tensorboard")
    trackers.on_train_start(None, SimpleNamespace(config=config, world=World(), directory=tmp_path))
    image = ValidationImage(prompt="a fox", seed=1, path=tmp_path / "fox.png", base=tmp_path / "base.png")
    trackers.on_validation(ValidationResult(step=4, images=(image,), folder=tmp_path))
    trackers.on_train_end(None, None)
    found = [EventAccumulator(str(path)).Reload() for path in (tmp_path / "trackers").rglob("events*.*")]
    (logged,) = next(each for each in found if each.Tags()["images"]).Images("validation/fox")
    pixels = np.asarray(Image.open(BytesIO(logged.encoded_image_string)))
    assert logged.step == 4
    assert {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()} == {(255, 0, 0), (0, 0, 255)}


def test_without_the_package_the_option_names_it(monkeypatch):
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    with pytest.raises(ConfigError, match="report_to belongs to smalti-plots") as caught:
        configure("--report_to=tensorboard", without=("all",))
    assert (caught.value.exit_code, "plugins/plots" in str(caught.value)) == (4, True)


@pytest.mark.parametrize(
    ("given", "names"), [("none", ()), ("none,tensorboard", ("tensorboard",)), ("wandb,tensorboard", ("wandb", "tensorboard"))]
)
def test_names_are_separated_by_commas_and_none_is_no_name(given, names):
    assert configure(f"--report_to={given}")[TrackerOptions].report_to == names
