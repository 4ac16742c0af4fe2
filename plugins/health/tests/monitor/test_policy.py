"""The policy alone: healthy GPUs are left alone, and what repeats is not decided again and again."""

from dataclasses import replace
from random import Random

import pytest

from smalti_health.policy import xids
from smalti_health.policy.decisions import Action
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import Policy, decide
from smalti_health.policy.readings import Device, Reading, payload
from smalti_health.policy.trace import Encoder, read_trace
from support.gpu_traces import device_of, healthy

DEVICE = Device(uuid="GPU-1", index=3, name="H200", slowdown=92, shutdown=95, memory_max=105, clock_max=1980)


@pytest.mark.parametrize("part", range(4))
def test_a_healthy_gpu_is_left_alone(part):
    for seed in range(part * 250, part * 250 + 250):
        chance = Random(seed)
        device = device_of(chance)
        found = list(decide({device.uuid: device}, healthy(chance, device, 200), Limits()))
        assert found == [], f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_in_a_healthy_trace_is_found(seed):
    chance = Random(seed)
    device = device_of(chance)
    readings = list(healthy(chance, device, 300))
    at = chance.randrange(50, 250)
    broken = [
        replace(each, ecc_uncorrected=each.ecc_uncorrected + 1) if each.ecc_uncorrected is not None and number >= at else each
        for number, each in enumerate(readings)
    ]
    [decision] = [each for each in decide({device.uuid: device}, broken, Limits()) if each.kind == "ecc"]
    assert (decision.action, decision.memory) == (Action.STOP_SUSPECT, True)
    assert readings[at].time <= decision.time <= readings[at + 6].time


def test_what_lasts_is_decided_once_an_hour():
    policy = Policy((DEVICE,), Limits())
    found = [policy.observe(Reading(uuid="GPU-1", time=60.0 * minute, remap_pending=1)) for minute in range(150)]
    assert [number for number, each in enumerate(found) if each] == [0, 60, 120]


def test_what_becomes_worse_is_decided_at_once():
    policy = Policy((DEVICE,), Limits())
    found = [policy.observe(Reading(uuid="GPU-1", time=10.0 * number, temperature=92)) for number in range(70)]
    assert [(number, each[0].action.name) for number, each in enumerate(found) if each] == [(6, "WARN"), (60, "STOP_SAVED")]


def test_the_policy_keeps_its_baselines_when_a_gpu_is_added():
    policy = Policy((DEVICE,), Limits())
    policy.observe(Reading(uuid="GPU-1", time=0.0, ecc_uncorrected=4))
    policy.add(Device(uuid="GPU-2"))
    policy.add(DEVICE)
    assert policy.observe(Reading(uuid="GPU-2", time=5.0, ecc_uncorrected=9)) == []
    [decision] = policy.observe(Reading(uuid="GPU-1", time=5.0, ecc_uncorrected=5))
    assert (decision.uuid, decision.message) == ("GPU-1", "1 uncorrectable ECC error since the start")


@pytest.mark.parametrize("seed", range(10))
def test_a_trace_is_read_as_it_was_written(seed, tmp_path):
    chance = Random(seed)
    devices = [device_of(chance) for _ in range(3)]
    readings = [each for group in zip(*(healthy(chance, device, 50) for device in devices), strict=True) for each in group]
    readings = [replace(each, time=round(each.time, 2)) for each in readings]
    encoder = Encoder(devices)
    lines = [*encoder.head(), *(encoder.line(each) for each in readings)]
    path = tmp_path / "health.node-0.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines) + '{"t":1.7e9,"g":0,"tem')  # the process was killed
    trace = read_trace((path,))
    assert trace.readings == tuple(readings)
    assert list(trace.devices.values()) == devices


def test_the_payload_has_the_fields_of_the_reference():
    reading = Reading(
        uuid="GPU-1", time=0.0, temperature=64, ecc_corrected=1, ecc_uncorrected=2, clock_reasons=0x44, xids=(31, 79)
    )
    assert payload(DEVICE, reading) == {
        "index": 3,
        "name": "H200",
        "uuid": "GPU-1",
        "temperature_celsius": 64,
        "ecc_errors_single": 1,
        "ecc_errors_double": 2,
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
        "memory_used_percent": None,
        "xid": 79,
    }


XIDS = {
    Action.STOP_NOW: {46, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158},
    Action.STOP_SUSPECT: {48, 171, 172},
    Action.STOP_SAVED: {74},
    None: {14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 154, 157, 160, 161},
}
APPLICATIONS = {8, 11, 13, 25, 31, 32, 60, 80, 88, 89, 94, 139} | {
    each for first, last in ((39, 41), (68, 73), (75, 77), (82, 86), (96, 105), (126, 135)) for each in range(first, last + 1)
}


def test_xids_have_the_action_of_the_catalogue():
    expected = {xid: action for action, listed in XIDS.items() for xid in listed}
    for xid in range(1, 200):
        decision = xids.decision(xid)
        assert (decision.action if decision else None) == expected.get(xid, Action.WARN), xid
        if decision is not None and decision.action is Action.WARN:
            assert ("an error of a program" in decision.message) == (xid in APPLICATIONS), xid
    classes = [value for value in vars(xids).values() if isinstance(value, frozenset) and value is not xids.MEMORY]
    assert sum(map(len, classes)) == len(frozenset().union(*classes))  # none is in two
    assert frozenset(xid for xid in range(200) if (found := xids.decision(xid)) and found.memory) == {48, 64, 95, 140, 171, 172}
