"""The policy alone: healthy GPUs are left alone, and what repeats is not decided again and again."""

from dataclasses import replace
from random import Random

import pytest

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
