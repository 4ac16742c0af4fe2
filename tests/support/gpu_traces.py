"""Readings of GPUs that are well, by seed: with everything that healthy ones do."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from smalti_health.policy.readings import IDLE, Device, Reading


def device_of(chance: Random) -> Device:
    """One GPU; older ones report no thresholds of memory, some none at all."""
    slowdown = chance.choice((None, 88, 92, 95))
    return Device(
        uuid=f"GPU-{chance.getrandbits(32):08x}",
        index=chance.randrange(8),
        name="healthy",
        slowdown=slowdown,
        shutdown=slowdown and slowdown + chance.choice((3, 5)),
        memory_max=chance.choice((None, 95, 105)),
        clock_max=chance.choice((None, 1410, 1980)),
    )


def healthy(chance: Random, device: Device, count: int) -> Iterator[Reading]:
    """Warming up, power caps, idle times, changes of the power state, correctable errors, short peaks, gaps."""
    time = 1.7e9
    every = chance.choice((1.0, 5.0, 10.0))
    limit = device.slowdown or 90
    temperature, target = 35.0, chance.uniform(50, limit - 4)
    corrected, uncorrected = chance.choice((0, 12)), chance.choice((0, 0, 3))
    capped, links = chance.random() < 0.5, chance.choice((None, 0x3FFFF, 0x3FFFE))
    idle_left = slow_left = 0
    busy_generation, width = chance.choice((4, 5)), chance.choice((8, 16))
    for number in range(count):
        time += every if chance.random() > 0.002 else chance.uniform(10, 300)  # the machine was suspended, or overloaded
        idle_left = idle_left - 1 if idle_left else chance.randrange(60) if chance.random() < 0.02 else 0
        slow_left = slow_left - 1 if slow_left else chance.randint(1, 3) if chance.random() < 0.03 else 0
        temperature += 0.1 * ((40 if idle_left else target) - temperature) + chance.gauss(0, 0.4)
        peak = limit + 1 if chance.random() < 0.002 and device.slowdown else 0
        corrected += chance.random() < 0.01
        bits = (
            IDLE if idle_left else (0x4 if capped else 0) | (chance.choice((0x8, 0x40, 0x80, 0x48, 0x20)) if slow_left else 0)
        )
        rare = number % 6 == 0
        yield Reading(
            uuid=device.uuid,
            time=time,
            recovery_action=0 if chance.random() < 0.99 else None,
            temperature=max(round(temperature), peak),
            memory_temperature=round(temperature) + 5 if (device.memory_max or 200) > temperature + 8 else None,
            ecc_corrected=corrected,
            ecc_uncorrected=uncorrected if chance.random() < 0.99 else None,
            remap_pending=0 if rare else None,
            remap_failed=0 if rare else None,
            clock_reasons=bits,
            clock=210 if idle_left else chance.randint(900, 1410),
            nvlinks=links if rare else None,
            nvlink_errors=number // 50,
            pcie_width=width if rare else None,
            pcie_generation=(1 if idle_left else busy_generation) if rare else None,
            memory_used_percent=round(chance.uniform(5, 99), 1),
            xids=(chance.choice((43, 45, 63, 92)),) if chance.random() < 0.001 else (),
        )
