"""Every signal and class, through the real NVML bindings, the reader and the policy."""

import pytest

from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import decide
from smalti_health.policy.readings import Device
from support.gpu_scenarios import SCENARIOS, play


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name.replace(" ", "-"))
def test_a_scenario_is_decided_as_expected(loaded, scenario):
    decided, _ = play(loaded, scenario)
    assert decided == scenario.expected


def test_the_scenarios_cover_what_they_should():
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS) >= 45
    assert {action.split()[1] for each in SCENARIOS for action in each.expected} == {
        "warn",
        "stop_saved",
        "stop_suspect",
        "stop_now",
    }


def test_what_was_decided_live_is_decided_again_from_the_readings(loaded):
    for scenario in SCENARIOS[::7]:
        decided, readings = play(loaded, scenario)
        if scenario.name == "no thresholds":
            continue
        device = Device(uuid=readings[0].uuid, slowdown=92, shutdown=95, memory_max=105, clock_max=1980)
        again = decide({device.uuid: device}, readings, Limits(**scenario.limits))
        assert {f"{each.kind} {each.action.name.lower()}" for each in again} == decided, scenario.name
