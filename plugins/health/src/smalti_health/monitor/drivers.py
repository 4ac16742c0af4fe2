"""The driver of this machine's GPUs: that of the first vendor that has one."""

from __future__ import annotations

from smalti_health.monitor.amd import AmdSmi
from smalti_health.monitor.nvml import Nvml
from smalti_health.monitor.reader import Absent, Driver


def open_driver() -> Driver:
    """Raises Absent, with a reason for each vendor. May hang where a driver does."""
    reasons = []
    for vendor in (Nvml, AmdSmi):
        try:
            driver: Driver = vendor()
        except Absent as absent:
            reasons.append(f"{vendor.vendor}: {absent}")
        else:
            return driver
    raise Absent("; ".join(reasons))
