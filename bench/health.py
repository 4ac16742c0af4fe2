"""The monitor of GPUs: its share of a CPU core with eight GPUs, and how many readings the policy looks at in a second.

The driver is the fake one, whose calls cost little: real ones take longer, but wait in the kernel for the device.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from random import Random

import psutil
from run import Result, paired
from sizes import sized

from smalti_health.monitor.process import Setup
from smalti_health.monitor.rank import Watch
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.options import HealthOptions
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import decide
from smalti_health.policy.readings import Device, Reading
from smalti_testing.nvml import FakeNvml

GPUS = 8
SECONDS = sized(20.0, short=0.5)
FAST = 0.25
"""Seconds between two rounds here; the cost of one round is that of one at the usual interval."""
PAIRS = sized(3, short=1)
READINGS = sized(100_000, short=1000)


def measure() -> list[Result]:
    usual = float(HealthOptions().gpu_health_interval)
    with tempfile.TemporaryDirectory() as name:
        fake = FakeNvml(Path(name))
        fake.set(f"count {GPUS}")
        os.environ.update(fake.environment)
        shares = [cpu_per_round(Path(name) / str(number)) / usual for number in range(PAIRS)]
    seconds = [1e6 * policy_seconds(seed) / READINGS for seed in range(PAIRS)]
    return [
        paired(f"health: monitor of {GPUS} GPUs, share of a core", shares, [1.0] * PAIRS, unit="cores", goal=0.001),
        paired("health: policy, a reading", seconds, [1.0] * PAIRS, unit="CPU us", goal=20.0),
    ]


def cpu_per_round(folder: Path) -> float:
    """CPU seconds of the process for one reading of all GPUs, without its start."""
    folder.mkdir()
    setup = Setup(
        run=f"bench-{os.getpid()}-{folder.name}",
        node=0,
        first=0,
        port="",
        directory=str(folder),
        interval=FAST,
        timeout=10.0,
        metrics_port=0,
        limits=Limits(),
    )
    watches = [
        Watch(setup, DeviceRequest(rank=rank, ordinal=rank), f"cuda:{rank}", print, starts=rank == 0) for rank in range(GPUS)
    ]
    for each in watches:
        each.start()
    [process] = psutil.Process().children()
    wait_for_lines(folder, 2 * GPUS)
    time.sleep(sized(5.0, short=0.0))
    before, earlier = process.cpu_times(), lines(folder)
    time.sleep(SECONDS)
    wait_for_lines(folder, earlier + GPUS)
    after, rounds = process.cpu_times(), (lines(folder) - earlier) / GPUS
    for each in watches:
        each.stop()
    return (after.user + after.system - before.user - before.system) / rounds


def lines(folder: Path) -> int:
    path = folder / "health.node-0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(folder: Path, count: int) -> None:
    while lines(folder) < count:
        time.sleep(0.05)


def policy_seconds(seed: int) -> float:
    chance = Random(seed)
    device = Device(uuid="GPU-1", slowdown=92, shutdown=95, clock_max=1980)
    readings = [
        Reading(
            uuid="GPU-1",
            time=5.0 * number,
            temperature=chance.randint(40, 93),
            ecc_uncorrected=0,
            clock_reasons=chance.choice((0, 1, 4, 8)),
            clock=chance.randint(900, 1980),
            nvlinks=0x3FFFF if number % 6 == 0 else None,
        )
        for number in range(READINGS)
    ]
    begun = time.process_time()
    for _ in decide({device.uuid: device}, readings, Limits()):
        pass
    return time.process_time() - begun
