"""Health of GPUs, hangs of ranks, and webhooks, as plugins of smalti. Importing this reads nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti_health.circuit_file import Circuit, CircuitFault, read_circuits
    from smalti_health.circuits import CircuitState, circuit_state
    from smalti_health.monitor.reader import Absent, Driver, GpuReader
    from smalti_health.monitor.requests import DeviceRequest
    from smalti_health.policy.readings import Device, Reading

__all__ = [
    "Absent",
    "Circuit",
    "CircuitFault",
    "CircuitState",
    "Device",
    "DeviceRequest",
    "Driver",
    "GpuReader",
    "Reading",
    "circuit_state",
    "read_circuits",
]

_MODULES = {
    "Absent": "monitor.reader",
    "Driver": "monitor.reader",
    "GpuReader": "monitor.reader",
    "DeviceRequest": "monitor.requests",
    "Device": "policy.readings",
    "Reading": "policy.readings",
}
"""Where names are that are not in `smalti_health.circuits`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"smalti_health.{_MODULES.get(name, 'circuits')}"), name)
