"""D1 to D3: GPUs that fail in every way, GPUs that are well, and drivers that hang or fail while they are watched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from smalti.types import GpuFault
from smalti_health.monitor.process import Setup
from smalti_health.monitor.rank import Watch
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.policy.decisions import Action
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import decide
from smalti_health.policy.readings import Reading
from smalti_testing.nvml import FakeNvml
from support.gpu_scenarios import SCENARIOS, play
from support.gpu_traces import device_of, healthy

from .subject import Report

TRACES = 1000
SECONDS = 10.0
FAILURES = (
    "hang.Temperature.0 1",
    "hang.FieldValues.0 1",
    "hang.EventSetWait.0 1",
    "error.Temperature.0 999",
    "error.FieldValues.0 10",
    "temp.0 4000000000",
    "ecc_uncorrected_volatile.0 18446744073709551615",
    "recovery.0 99",
    "clocks.0 18446744073709551615",
    "error.EventSetWait.0 999",
)
"""Of the driver of GPU 0, or values that cannot be: warnings at most, and GPU 1 is watched all the same."""
Breakage = tuple[str, Action, Callable[[Reading], Reading]]
BREAKAGES: tuple[Breakage, ...] = (
    ("lost", Action.STOP_NOW, lambda each: replace(each, lost=True)),
    ("recovery_action", Action.STOP_NOW, lambda each: replace(each, recovery_action=1)),
    ("ecc", Action.STOP_SUSPECT, lambda each: replace(each, ecc_uncorrected=5)),
    ("row_remap", Action.STOP_SUSPECT, lambda each: replace(each, remap_failed=1)),
    ("xid", Action.STOP_NOW, lambda each: replace(each, xids=(79,))),
    ("nvlink", Action.STOP_SAVED, lambda each: replace(each, nvlinks=0)),
)


def failing_gpus(chance: Random, place: Path) -> Report:
    """D1: the scenarios in another order, and faults at any moment of traces that are healthy until then."""
    report, fake = Report(), _fake(place)
    fake.load()
    for scenario in chance.sample(SCENARIOS, len(SCENARIOS)):
        decided, _ = play(fake, scenario)
        report.expect(decided == scenario.expected, f"{scenario.name}: {sorted(decided)}")
        report.faults += bool(scenario.expected)
    for _ in range(200):
        _broken_trace(report, chance)
    return report


def _broken_trace(report: Report, chance: Random) -> None:
    seed, device = chance.getrandbits(32), device_of(chance)
    readings = [replace(each, nvlinks=0x3) for each in healthy(Random(seed), device, 200)]
    kind, action, breaks = chance.choice(BREAKAGES)
    at = chance.randrange(20, 180)
    found = list(decide({device.uuid: device}, [*readings[:at], *map(breaks, readings[at:])], Limits()))
    report.faults += 1
    report.expect(
        [(each.kind, each.action) for each in found] == [(kind, action)]
        and readings[at].time <= found[0].time <= readings[min(at + 2, 199)].time,
        f"{kind} at reading {at} of trace {seed}: {found}",
    )


def healthy_gpus(chance: Random, place: Path) -> Report:
    """D2: nothing is decided about GPUs that are well."""
    report = Report()
    for _ in range(TRACES):
        seed = chance.getrandbits(32)
        trace = Random(seed)
        device = device_of(trace)
        found = list(decide({device.uuid: device}, healthy(trace, device, 300), Limits()))
        report.expect(found == [], f"trace {seed}: {found[:2]}")
        report.faults += 1
    return report


def failing_drivers(chance: Random, place: Path) -> Report:
    """D3: real monitors under a driver that fails for one GPU, while another one has a fault."""
    report = Report()
    for number, failure in enumerate(chance.sample(FAILURES, len(FAILURES))):
        _failing_driver(report, chance, place / str(number), failure)
    return report


def one_failing_driver(chance: Random, place: Path) -> Report:
    report = Report()
    _failing_driver(report, chance, place, chance.choice(FAILURES))
    return report


def _failing_driver(report: Report, chance: Random, place: Path, failure: str) -> None:
    fake = _fake(place)
    fake.set("count 2")
    before = dict(os.environ)
    os.environ.update(fake.environment)
    setup = Setup(
        run=f"torture-{chance.getrandbits(48):x}",
        node=0,
        first=0,
        port="",
        directory=str(place),
        interval=0.1,
        timeout=0.3,
        metrics_port=0,
        limits=Limits(),
    )
    faults: tuple[list[GpuFault], list[GpuFault]] = ([], [])
    watches = [
        Watch(setup, DeviceRequest(rank=rank, ordinal=rank), f"cuda:{rank}", faults[rank].append, starts=rank == 0)
        for rank in (0, 1)
    ]
    try:
        for each in watches:
            each.start()
        trace = place / "health.node-0.jsonl"
        _wait(lambda: trace.exists() and '"g":1' in trace.read_text())
        fake.set("count 2", failure)
        time.sleep(chance.uniform(0.1, 1.0))
        fake.set("count 2", failure, "ecc_uncorrected_volatile.1 1")
        _wait(lambda: bool(faults[1]))
        report.faults += 1
        report.expect([each.kind for each in faults[1]] == ["ecc"], f"{failure}: the other GPU: {faults[1]}")
        report.expect(all(each.severity == "warning" for each in faults[0]), f"{failure}: {faults[0]}")
    finally:
        for each in watches:
            each.stop()
        os.environ.clear()
        os.environ.update(before)


def _fake(place: Path) -> FakeNvml:
    place.mkdir(parents=True, exist_ok=True)
    return FakeNvml(place)


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
