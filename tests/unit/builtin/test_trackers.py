"""Which trackers a run starts."""

from importlib.util import find_spec

import pytest

from smalti.builtin.trackers import KNOWN, plugin, tracker_names
from smalti.config import TrackingOptions


def options(*names: str) -> TrackingOptions:
    return TrackingOptions.model_validate({"report_to": names})


def test_all_are_those_whose_package_is_installed_each_once():
    installed = [name for name in KNOWN if find_spec(name) is not None]
    assert installed
    assert tracker_names(options("all", installed[0])) == installed


@pytest.mark.parametrize("words", [("none",), ()])
def test_none_starts_none(words):
    assert tracker_names(options(*words)) == []


def test_all_is_no_unknown_tracker(configure):
    assert plugin.check_config(configure("--report_to=all")) == []
    (problem,) = plugin.check_config(configure("--report_to=al"))
    assert "unknown tracker 'al'" in problem.message
