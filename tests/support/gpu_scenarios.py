"""What GPUs can do, second by second, as the fake driver reports it, and what has to be decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from smalti_health.monitor.nvml import Nvml
from smalti_health.monitor.reader import Absent
from smalti_health.monitor.requests import DeviceRequest
from smalti_health.policy.limits import Limits
from smalti_health.policy.policy import Policy
from smalti_health.policy.readings import Reading
from smalti_testing.nvml import FakeNvml

Step = tuple[float, Sequence[str]]
"""For how many seconds the driver reports these lines."""
EVERY = 5.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`expected` are "kind action" pairs, in any order. The steps follow a minute without a fault, unless `from_start`."""

    name: str
    steps: Sequence[Step]
    expected: frozenset[str] = frozenset()
    from_start: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)


def play(fake: FakeNvml, scenario: Scenario) -> tuple[set[str], list[Reading]]:
    """The decisions about GPU 0, as "kind action", and its readings, by the real bindings and the real reader."""
    fake.set("count 1", *(scenario.steps[0][1] if scenario.from_start else ()))
    driver = Nvml()
    uuid = driver.find(DeviceRequest(rank=0, ordinal=0))
    assert uuid is not None
    gpu = driver.gpu(uuid)
    events = driver.watch(uuid)
    policy = Policy((gpu.describe(),), Limits(**scenario.limits))
    decided: set[str] = set()
    readings: list[Reading] = []
    time = 0.0
    for seconds, lines in ((60.0, ()), *scenario.steps) if not scenario.from_start else scenario.steps:
        fake.set("count 1", *lines)
        xid = None
        with suppress(Absent):  # a GPU that is lost has no events
            xid = driver.wait(events, 0.0)
        for number in range(max(1, round(seconds / EVERY))):
            reading = replace(gpu.read(), time=time, xids=(xid,) if xid is not None and number == 0 else ())
            readings.append(reading)
            decided.update(f"{each.kind} {each.action.name.lower()}" for each in policy.observe(reading))
            time += EVERY
    return decided, readings


def _one(name: str, line: str, *expected: str, seconds: float = 60.0, **settings: object) -> Scenario:
    lines = tuple(line.split(", ")) if line else ()
    return Scenario(name=name, steps=((seconds, lines),), expected=frozenset(expected), **settings)  # type: ignore[arg-type]


def _blip(name: str, line: str, seconds: float) -> Scenario:
    """For a while, and then as before: nothing is decided."""
    return Scenario(name=name, steps=((seconds, tuple(line.split(", "))), (300.0, ())))


_NO = "monitor warn"
SCENARIOS = (
    # The recovery action.
    *(_one(f"recovery action {n}", f"recovery.0 {n}", "recovery_action stop_now") for n in (1, 2, 4, 6, 7)),
    *(_one(f"recovery action {n}", f"recovery.0 {n}", "recovery_action stop_saved") for n in (3, 5)),
    _one("recovery action at the start", "recovery.0 1", "recovery_action stop_now", from_start=True),
    _one("recovery action that does not exist", "recovery.0 4000000000", _NO),
    # The GPU is gone.
    _one("GPU lost", "lost.0 1", "lost stop_now"),
    _one("GPU requires a reset", "error.Temperature 16, error.TotalEccErrors 16, error.FieldValues 16", "lost stop_now"),
    _one("one call says that the GPU is lost", "error.Temperature.0 15"),
    # Memory.
    _one("an uncorrectable ECC error", "ecc_uncorrected_volatile.0 1", "ecc stop_suspect"),
    _one("ECC errors from before the start", "ecc_uncorrected_volatile.0 7", from_start=True),
    _one("ECC errors of the card's whole life", "ecc_uncorrected_aggregate.0 70", from_start=True),
    Scenario(
        name="one more ECC error than at the start",
        steps=((60.0, ("ecc_uncorrected_volatile.0 7",)), (60.0, ("ecc_uncorrected_volatile.0 8",))),
        expected=frozenset({"ecc stop_suspect"}),
        from_start=True,
    ),
    Scenario(
        name="the driver counts from zero again",
        steps=((60.0, ("ecc_uncorrected_volatile.0 7",)), (60.0, ("ecc_uncorrected_volatile.0 0",))),
        from_start=True,
    ),
    Scenario(
        name="an ECC error after the driver counts from zero again",
        steps=tuple((60.0, (f"ecc_uncorrected_volatile.0 {count}",)) for count in (7, 0, 1)),
        expected=frozenset({"ecc stop_suspect"}),
        from_start=True,
    ),
    _one("fewer ECC errors than the threshold", "ecc_uncorrected_volatile.0 2", limits={"ecc_errors": 3}),
    _one("correctable ECC errors", "ecc_corrected_volatile.0 5000"),
    _one("a count of ECC errors that is nonsense", "ecc_uncorrected_volatile.0 18446744073709551615", _NO),
    _one("row remap failure", "remap_failed.0 1", "row_remap stop_suspect"),
    _one("row remap failure at the start", "remap_failed.0 1", "row_remap stop_saved", from_start=True),
    _one("row remap pending", "remap_pending.0 1", "row_remap warn"),
    _one("remapped rows", "remap_uncorrected.0 3, remap_corrected.0 4"),
    # XIDs, one of each class.
    *(_one(f"XID {n}", f"xid.0 {n}", "xid warn") for n in (13, 31, 39, 69, 75, 94)),
    *(_one(f"XID {n}", f"xid.0 {n}") for n in (37, 43, 45, 63, 92, 121, 137)),
    *(_one(f"XID {n}", f"xid.0 {n}", "xid stop_now") for n in (46, 62, 64, 79, 95, 109, 119, 120, 136, 140, 143)),
    _one("XID 48", "xid.0 48", "xid stop_suspect"),
    _one("XID 74", "xid.0 74", "xid stop_saved"),
    _one("XID 145", "xid.0 145", "xid warn"),
    _one("XID in no class", "xid.0 7777", "xid warn"),
    _one("XID of before the start", "xid.0 79", from_start=True),
    # Heat.
    _one("hot for two minutes", "temp.0 92", "thermal warn", seconds=120),
    _one("hot for twenty minutes", "temp.0 92", "thermal warn", "thermal stop_saved", seconds=1200),
    _one("hot memory for twenty minutes", "memory_temp.0 106", "thermal warn", "thermal stop_saved", seconds=1200),
    _one("no margin to the slowdown temperature", "margin.0 0", "thermal warn", seconds=120, from_start=True),
    _one("near the slowdown temperature", "temp.0 91", seconds=1200),
    _one("near it, with a margin", "temp.0 91", "thermal warn", seconds=120, limits={"temperature_margin": 2}),
    _one("close to the shutdown temperature", "temp.0 94", "thermal stop_saved", seconds=30),
    _blip("hot for half a minute", "temp.0 92", 30),
    _blip("one sample at the shutdown temperature", "temp.0 95", 5),
    _one("no thresholds", "temp.0 99, no_thresholds.0 1", seconds=1200, from_start=True),
    _one("a temperature that is nonsense", "temp.0 4294967241", _NO),
    # Clocks.
    _blip("one sample of hardware slowdown", "clocks.0 0x8", 5),
    _blip("five minutes of hardware slowdown", "clocks.0 0x48, clock.0 500", 300),
    _one("hardware slowdown", "clocks.0 0x8, clock.0 1600", "slowdown warn", seconds=900),
    _one("thermal slowdown", "clocks.0 0x48, clock.0 1600", "thermal warn", seconds=900),
    _one("thermal slowdown to a third", "clocks.0 0x48, clock.0 600", "thermal stop_saved", seconds=1200),
    _one("power brake", "clocks.0 0x80, clock.0 600", "power_brake stop_saved", seconds=1200),
    _one("thermal slowdown by software", "clocks.0 0x20, clock.0 500", "thermal warn", seconds=900),
    _one("power cap", "clocks.0 0x4, clock.0 900", seconds=1200),
    _one("idle", "clocks.0 0x1, clock.0 210, pcie_gen.0 1", seconds=1200),
    # Links.
    _one("NVLink down", "nvlink.0.3 0", "nvlink stop_saved", seconds=90),
    _one("NVLink down at the start", "nvlink.0.3 0", seconds=90, from_start=True),
    _blip("NVLink down in one reading", "nvlink.0.3 0", 30),
    _one("PCIe width", "pcie_width.0 8", "pcie warn", seconds=120),
    _one("PCIe speed", "pcie_gen.0 3", "pcie warn", seconds=120),
    _one("PCIe width of the start", "pcie_width.0 8", seconds=120, from_start=True),
    _one("PCIe speed while idle", "pcie_gen.0 1, clocks.0 1", seconds=300),
    # A driver that fails.
    _one("a call fails", "error.Temperature 999", _NO),
    _one("every call fails", "error.Temperature 999, error.FieldValues 999, error.TotalEccErrors 999", _NO),
    _one("an old driver", "error.FieldValues 13, error.Margin 13, error.CurrentClocksEventReasons 13", from_start=True),
    _one("a card without ECC", "error.TotalEccErrors 3, error.RemappedRows 3", from_start=True),
    _one("a call that becomes unsupported", "error.CurrentClocksEventReasons 3, error.RemappedRows 3"),
)
