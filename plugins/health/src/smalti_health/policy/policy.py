"""The policy: from readings to decisions. `decide` is a pure function; `Policy` is the same one reading at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from smalti_health.policy.decisions import Action, Decision
from smalti_health.policy.limits import Limits
from smalti_health.policy.readings import Device, Reading
from smalti_health.policy.signals import DevicePolicy


class Policy:
    """The policy for all GPUs of a node. What was decided is not decided again before `Limits.repeat_seconds`."""

    def __init__(self, devices: Iterable[Device], limits: Limits) -> None:
        self._limits = limits
        self._devices: dict[str, DevicePolicy] = {}
        self._decided: dict[tuple[str, str, str], tuple[float, Action]] = {}
        for device in devices:
            self.add(device)

    def add(self, device: Device) -> None:
        """Decide about this GPU too, or from now on with these of its thresholds."""
        if device.uuid in self._devices:
            self._devices[device.uuid].device = device
        else:
            self._devices[device.uuid] = DevicePolicy(device, self._limits)

    def observe(self, reading: Reading) -> list[Decision]:
        """The new decisions after this reading; nothing for a GPU that is not one of `devices`."""
        policy = self._devices.get(reading.uuid)
        found = policy.observe(reading) if policy is not None else ()
        return [replace(each, uuid=reading.uuid, time=reading.time) for each in found if self._is_new(each, reading)]

    def _is_new(self, decision: Decision, reading: Reading) -> bool:
        key = (reading.uuid, decision.kind, decision.detail)
        time, action = self._decided.get(key, (float("-inf"), Action.IGNORE))
        if decision.action <= action and reading.time - time < self._limits.repeat_seconds:
            return False
        self._decided[key] = (reading.time, decision.action)
        return True


def decide(devices: Mapping[str, Device], readings: Iterable[Reading], limits: Limits) -> Iterator[Decision]:
    """All decisions about a trace, in its order."""
    policy = Policy(devices.values(), limits)
    for reading in readings:
        yield from policy.observe(reading)
