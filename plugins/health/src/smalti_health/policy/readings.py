"""What a monitor reads from a GPU: the same for every vendor, and None for what a GPU or its driver does not report."""

from __future__ import annotations

from dataclasses import dataclass

IDLE = 0x1
HW_SLOWDOWN = 0x8
SW_THERMAL = 0x20
HW_THERMAL = 0x40
POWER_BRAKE = 0x80
REASONS = {
    IDLE: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    HW_SLOWDOWN: "hw_slowdown",
    0x10: "sync_boost",
    SW_THERMAL: "sw_thermal_slowdown",
    HW_THERMAL: "hw_thermal_slowdown",
    POWER_BRAKE: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's clock event reasons, by bit."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What does not change: `index` is the driver's, temperatures are in degrees Celsius, `clock_max` in MHz."""

    uuid: str
    index: int = 0
    name: str = ""
    slowdown: int | None = None
    shutdown: int | None = None
    memory_max: int | None = None
    clock_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One GPU at one time, in unix seconds.

    ECC counts are volatile: since the driver was loaded. `temperature_margin` is the distance to the slowdown threshold.
    `nvlinks` has a bit for each link that is active. `xids` came since the last reading. `unanswered` is a call to the driver
    that has not returned since `unanswered_seconds`; `failed` are calls that returned an unexpected error.
    """

    uuid: str
    time: float
    lost: bool = False
    recovery_action: int | None = None
    temperature: int | None = None
    temperature_margin: int | None = None
    memory_temperature: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    clock_reasons: int | None = None
    clock: int | None = None
    nvlinks: int | None = None
    nvlink_errors: int | None = None
    pcie_width: int | None = None
    pcie_generation: int | None = None
    memory_used_percent: float | None = None
    xids: tuple[int, ...] = ()
    unanswered: str = ""
    unanswered_seconds: float = 0.0
    failed: tuple[str, ...] = ()


def reasons(bits: int | None) -> list[str]:
    """The names of the clock event reasons."""
    return [name for bit, name in REASONS.items() if (bits or 0) & bit]


def payload(device: Device, reading: Reading) -> dict[str, object]:
    """What `GpuFault.reading` has of a reading, in JSON's types."""
    return {
        "index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "temperature_celsius": reading.temperature,
        "ecc_errors_single": reading.ecc_corrected,
        "ecc_errors_double": reading.ecc_uncorrected,
        "throttle_reasons": reasons(reading.clock_reasons),
        "memory_used_percent": reading.memory_used_percent,
        "xid": reading.xids[-1] if reading.xids else None,
    }
