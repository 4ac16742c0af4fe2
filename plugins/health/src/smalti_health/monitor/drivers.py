"""The driver of this machine's GPUs: that of the first vendor that has one.

A package adds a vendor by an entry point in the group `smalti.gpu_drivers`, whose name is that of the vendor and whose object
is called without arguments and returns a `Driver`. The monitor's process calls it, without any plugin of smalti.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from smalti_health.monitor.amd import AmdSmi
from smalti_health.monitor.nvml import Nvml
from smalti_health.monitor.reader import Absent, Driver

GROUP = "smalti.gpu_drivers"


def open_driver() -> Driver:
    """Raises Absent, with a reason for each vendor. May hang where a driver does."""
    reasons = []
    for vendor, open_one in _vendors():
        try:
            return open_one()
        except Absent as absent:
            reasons.append(f"{vendor}: {absent}")
        except Exception as error:  # noqa: BLE001 - whatever a driver's package raises, another vendor's GPUs are read
            reasons.append(f"{vendor}: {type(error).__name__}: {error}")
    raise Absent("; ".join(reasons))


def _vendors() -> Iterator[tuple[str, Callable[[], Driver]]]:
    """Name and constructor of each vendor's driver: our own first, then those of other packages by name."""
    yield Nvml.vendor, Nvml
    yield AmdSmi.vendor, AmdSmi
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield entry.name, partial(_load, entry)


def _load(entry: EntryPoint) -> Driver:
    driver: Driver = entry.load()()
    return driver
