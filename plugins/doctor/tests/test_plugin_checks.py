"""Plugins are asked what is wrong with this machine; one that fails or hangs hides no other."""

import threading

import pytest

from smalti import Finding, hookimpl
from smalti.errors import InvalidOptionError
from smalti.plugins.registry import PluginInfo, Plugins
from smalti_doctor.plugin_checks import plugin_findings


class Compiler:
    @hookimpl
    def diagnose(self, config):
        return [Finding(check="compiler", level="error", message=f"g++ is missing for {config}", fix="install it")]


class Failing:
    @hookimpl
    def diagnose(self):
        raise OSError("no such device")


class Reading:
    """Reads an option that has no valid value."""

    @hookimpl
    def diagnose(self):
        raise InvalidOptionError("seed")


class Hanging:
    def __init__(self):
        self.release = threading.Event()

    @hookimpl
    def diagnose(self):
        self.release.wait(60)


@pytest.fixture
def registered():
    plugins, hanging = Plugins(), Hanging()
    for name, plugin in (("failing", Failing()), ("reading", Reading()), ("hanging", hanging), ("compiler", Compiler())):
        plugins.register(PluginInfo(name=name, distribution=f"smalti-{name}", version="1"), plugin)
    yield plugins
    hanging.release.set()


def test_hook_diagnose_is_asked_of_every_plugin_though_one_fails_and_another_hangs(registered):
    found = {each.check: each for each in plugin_findings(registered, None, seconds=0.5)}
    assert (found["compiler"].message, found["compiler"].level) == ("g++ is missing for None", "error")
    assert found["plugin failing"].message.endswith("failed: OSError: no such device")
    assert "plugin reading" not in found
    assert "did not return within 0.5 s" in found["plugin hanging"].message
    assert all(each.level == "warning" and "--without" in each.fix for name, each in found.items() if name != "compiler")
