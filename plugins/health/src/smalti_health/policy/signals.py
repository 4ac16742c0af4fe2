"""What the signals of one GPU mean. Each function looks at one signal; counts are compared with those of the first reading."""

from __future__ import annotations

from collections.abc import Iterator

from smalti_health.policy import xids
from smalti_health.policy.decisions import Action, Decision
from smalti_health.policy.hysteresis import Held, Share
from smalti_health.policy.limits import Limits
from smalti_health.policy.readings import HW_SLOWDOWN, HW_THERMAL, IDLE, POWER_BRAKE, SW_THERMAL, Device, Reading

_RECOVERY = {
    1: (Action.STOP_NOW, "reset the GPU"),
    2: (Action.STOP_NOW, "restart the node"),
    3: (Action.STOP_SAVED, "end all programs that use peer-to-peer transfers, and reset the GPU"),
    4: (Action.STOP_NOW, "end all programs on the GPU, and reset it"),
    5: (Action.STOP_SAVED, "recover the IMEX domain"),
    6: (Action.STOP_NOW, "reset the bus of the GPU"),
    7: (Action.STOP_NOW, "restart the system"),
}
"""NVML's field 230, the recovery action; drivers from r570 on."""
_HARDWARE = HW_SLOWDOWN | HW_THERMAL | POWER_BRAKE
_CAUSES = ((HW_THERMAL | SW_THERMAL, "thermal"), (POWER_BRAKE, "power_brake"), (HW_SLOWDOWN, "slowdown"))
_COLDEST, _HOTTEST = -40, 150
_LARGEST_INCREASE = 1_000_000
"""A count that grows by more than this between two readings is nonsense."""


class DevicePolicy:
    """The state of the policy for one GPU: baselines and conditions."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device = device
        self._limits = limits
        self._remap_failed_before: bool | None = None
        self._ecc: int | None = None
        self._ecc_last = 0
        self._links: int | None = None
        self._link_errors: tuple[float, int] | None = None
        self._width: int | None = None
        self._generation: int | None = None
        self._hot, self._memory_hot, self._near_shutdown = Held(), Held(), Held()
        self._links_down, self._link_noise, self._narrow, self._slow = Held(), Held(), Held(), Held()
        self._slowed = Share(limits.slowdown_window)
        self._slowed_by_hardware = Share(limits.slowdown_window)

    def observe(self, reading: Reading) -> Iterator[Decision]:
        """What is wrong at this reading, whether or not it was at the last one."""
        if reading.lost:
            message = "the GPU is lost: the driver cannot reach it any more; restart the node"
            yield Decision(kind="lost", action=Action.STOP_NOW, message=message)
        yield from self._recovery(reading)
        yield from self._ecc_errors(reading)
        yield from self._remaps(reading)
        for xid in reading.xids:
            if (decision := xids.decision(xid)) is not None:
                yield decision
        yield from self._temperature(reading)
        yield from self._clocks(reading)
        yield from self._nvlink(reading)
        yield from self._pcie(reading)
        yield from self._driver(reading)

    def _recovery(self, reading: Reading) -> Iterator[Decision]:
        if not reading.recovery_action:
            return
        known = _RECOVERY.get(reading.recovery_action)
        if known is None:
            yield _nonsense("recovery action", reading.recovery_action)
        else:
            action, what = known
            yield Decision(
                kind="recovery_action", detail=str(reading.recovery_action), action=action, message=f"the driver asks to {what}"
            )

    def _ecc_errors(self, reading: Reading) -> Iterator[Decision]:
        count = reading.ecc_uncorrected
        if count is None:
            return
        if self._ecc is None or count < self._ecc:  # the driver was loaded again
            self._ecc = self._ecc_last = count
        if count - self._ecc_last > _LARGEST_INCREASE:
            yield _nonsense("count of ECC errors", count)
            return
        self._ecc_last = count
        new = count - self._ecc
        if new >= self._limits.ecc_errors:
            message = f"{new} uncorrectable ECC error{'s' if new > 1 else ''} since the start"
            yield Decision(kind="ecc", action=Action.STOP_SUSPECT, message=message, memory=True)

    def _remaps(self, reading: Reading) -> Iterator[Decision]:
        if self._remap_failed_before is None and reading.remap_failed is not None:
            self._remap_failed_before = bool(reading.remap_failed)
        if reading.remap_failed:
            before = self._remap_failed_before
            message = "a row of memory could not be remapped; the GPU has to be replaced"
            action = Action.STOP_SAVED if before else Action.STOP_SUSPECT
            yield Decision(kind="row_remap", detail="failed", action=action, message=message, memory=not before)
        elif reading.remap_pending:
            message = "a row of memory will be remapped when the GPU is reset; reset it after this run"
            yield Decision(kind="row_remap", detail="pending", action=Action.WARN, message=message)

    def _temperature(self, reading: Reading) -> Iterator[Decision]:
        device, limits = self.device, self._limits
        celsius = reading.temperature
        if celsius is not None and not _COLDEST < celsius < _HOTTEST:
            yield _nonsense("temperature", celsius)
            return
        over = _over(celsius, device.slowdown, reading.temperature_margin)
        self._hot.update(reading.time, None if over is None else over >= -limits.temperature_margin)
        over_memory = _over(reading.memory_temperature, device.memory_max, None)
        self._memory_hot.update(reading.time, None if over_memory is None else over_memory >= -limits.temperature_margin)
        near = None if celsius is None or device.shutdown is None else celsius >= device.shutdown - limits.shutdown_margin
        self._near_shutdown.update(reading.time, near)
        for held, what, value in ((self._hot, "GPU", celsius), (self._memory_hot, "memory", reading.memory_temperature)):
            if held.for_(limits.temperature_warn_seconds):
                stop = held.for_(limits.temperature_seconds)
                message = f"the {what} is at its slowdown temperature for {held.seconds:.0f} s ({value} °C)"
                yield Decision(kind="thermal", detail=what, action=Action.STOP_SAVED if stop else Action.WARN, message=message)
        if self._near_shutdown.for_(limits.shutdown_seconds):
            message = f"the GPU is at {celsius} °C; it turns itself off at {device.shutdown} °C"
            yield Decision(kind="thermal", detail="shutdown", action=Action.STOP_SAVED, message=message)

    def _clocks(self, reading: Reading) -> Iterator[Decision]:
        bits, device, limits = reading.clock_reasons, self.device, self._limits
        if bits is None:
            return
        clock = reading.clock / device.clock_max if reading.clock is not None and device.clock_max else None
        self._slowed.update(reading.time, bool(bits & (_HARDWARE | SW_THERMAL)), clock)
        self._slowed_by_hardware.update(reading.time, bool(bits & _HARDWARE), clock)
        if not self._slowed.full or self._slowed.share < limits.slowdown_share:
            return
        hardware, mean = self._slowed_by_hardware, self._slowed_by_hardware.mean
        stop = hardware.share >= limits.slowdown_share and mean is not None and mean < limits.slowdown_clock
        cause = next((name for mask, name in _CAUSES if bits & mask), "slowdown")
        of_clock = f", at {mean:.0%} of its largest clock" if mean is not None else ""
        minutes = limits.slowdown_window / 60
        message = f"the GPU was slowed down in {self._slowed.share:.0%} of the last {minutes:.0f} minutes{of_clock}"
        action = Action.STOP_SAVED if stop else Action.WARN
        yield Decision(kind="slowdown" if cause == "slowdown" else cause, detail="clocks", action=action, message=message)

    def _nvlink(self, reading: Reading) -> Iterator[Decision]:
        if reading.nvlinks is not None:
            self._links = reading.nvlinks if self._links is None else self._links
            down = self._links & ~reading.nvlinks
            self._links_down.update(reading.time, bool(down))
            if self._links_down.for_(0, readings=2):
                links = ", ".join(str(bit) for bit in range(down.bit_length()) if down >> bit & 1)
                yield Decision(
                    kind="nvlink", action=Action.STOP_SAVED, message=f"NVLink {links} is down; it was up at the start"
                )
        if reading.nvlink_errors is not None:
            before, self._link_errors = self._link_errors, (reading.time, reading.nvlink_errors)
            if before is not None and reading.time > before[0]:
                rate = (reading.nvlink_errors - before[1]) / (reading.time - before[0])
                self._link_noise.update(reading.time, self._limits.nvlink_errors_per_second <= rate < _LARGEST_INCREASE)
                if self._link_noise.for_(60):
                    yield Decision(kind="nvlink", detail="errors", action=Action.WARN, message=f"NVLink repeats {rate:.0f}/s")

    def _pcie(self, reading: Reading) -> Iterator[Decision]:
        """A link that is idle may be slower; one that was slower at the start is left alone."""
        if reading.pcie_width is not None:
            self._width = reading.pcie_width if self._width is None else self._width
            self._narrow.update(reading.time, reading.pcie_width < self._width)
            if self._narrow.for_(0):
                message = f"the PCIe link has {reading.pcie_width} lanes; it had {self._width} at the start"
                yield Decision(kind="pcie", detail="width", action=Action.WARN, message=message)
        if reading.pcie_generation is not None and not (reading.clock_reasons or 0) & IDLE:
            self._generation = max(reading.pcie_generation, self._generation or 0)
            self._slow.update(reading.time, reading.pcie_generation < self._generation)
            if self._slow.for_(0):
                message = f"the PCIe link runs at generation {reading.pcie_generation}, before at {self._generation}"
                yield Decision(kind="pcie", detail="speed", action=Action.WARN, message=message)

    def _driver(self, reading: Reading) -> Iterator[Decision]:
        """Failures of the driver to tell are no faults of the GPU."""
        if reading.unanswered:
            message = f"the driver has not answered {reading.unanswered} for {reading.unanswered_seconds:.0f} s"
            yield Decision(kind="monitor", detail="unanswered", action=Action.WARN, message=message)
        for call in reading.failed:
            yield Decision(kind="monitor", detail=call, action=Action.WARN, message=f"the driver fails: {call}")


def _over(celsius: int | None, limit: int | None, margin: int | None) -> float | None:
    """Degrees above the limit, None if unknown."""
    if margin is not None and abs(margin) < _HOTTEST:
        return -margin
    return None if celsius is None or limit is None or limit <= 0 else celsius - limit


def _nonsense(what: str, value: object) -> Decision:
    message = f"the driver reports an impossible {what}, {value}, which is ignored"
    return Decision(kind="monitor", detail=what, action=Action.WARN, message=message)
