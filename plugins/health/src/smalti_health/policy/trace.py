"""The file of readings: one line of JSON for each GPU and each reading.

A line `{"device": {...}}` describes a GPU. A line `{"t": seconds, "g": index, ...}` has only what differs from the last
reading of that GPU in the file, and null for what is not reported any more. What happened once (`xids`, `failed`,
`unanswered`) and what is not read each time (links, remapped rows) is never carried over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from smalti import UserError
from smalti.system import load_json
from smalti_health.policy.readings import Device, Reading

VERSION = 1
_RARE = ("nvlinks", "remap_pending", "remap_failed", "pcie_width", "pcie_generation")
_ONCE = ("xids", "failed", "unanswered", "unanswered_seconds", "lost", *_RARE)
_KEYS = tuple(field.name for field in fields(Reading) if field.name not in ("uuid", "time", *_ONCE))
_EMPTY = {field.name: field.default for field in fields(Reading)}


class Encoder:
    """Lines of one file. Use a new one for each file."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = {device.uuid: (number, device) for number, device in enumerate(devices)}
        self._last: dict[int, dict[str, object]] = {}

    def head(self) -> list[str]:
        """The first lines of the file."""
        return [json.dumps({"device": asdict(device), "version": VERSION}) for _, device in self._devices.values()]

    def line(self, reading: Reading) -> str:
        number, _ = self._devices[reading.uuid]
        values = {key: getattr(reading, key) for key in _KEYS}
        last = self._last.get(number, {})
        line = {"t": round(reading.time, 2), "g": number}
        line.update({key: value for key, value in values.items() if value != last.get(key)})
        line.update({key: value for key in _ONCE if (value := getattr(reading, key)) != _EMPTY[key]})
        self._last[number] = values
        return json.dumps(line, separators=(",", ":"))


class Trace:
    """A trace that was read. `readings` may be iterated over again and again."""

    def __init__(self, devices: Mapping[str, Device], readings: tuple[Reading, ...]) -> None:
        self.devices = devices
        self.readings = readings


def read_trace(paths: Iterable[Path]) -> Trace:
    """The readings of these files, which follow one another. Raises UserError for a file that is no trace."""
    devices: dict[str, Device] = {}
    readings: list[Reading] = []
    for path in paths:
        readings.extend(_read(path, devices))
    return Trace(devices, tuple(readings))


def _read(path: Path, devices: dict[str, Device]) -> Iterator[Reading]:
    numbered: list[Device] = []
    last: dict[int, dict[str, object]] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for count, text in enumerate(lines, start=1):
        try:
            found = load_json(text)
            if "device" in found:
                device = Device(**found["device"])
                if any(each.uuid == device.uuid for each in numbered):  # a monitor that was started again
                    numbered, last = [], {}
                numbered.append(device)
                devices[device.uuid] = device
                continue
            number, time = found.pop("g"), found.pop("t")
            once = {key: found.pop(key) for key in _ONCE if key in found}
            state = last.setdefault(number, {})
            state.update(found)
            values: dict[str, Any] = {
                **state,
                **{key: tuple(value) if isinstance(value, list) else value for key, value in once.items()},
            }
            yield Reading(uuid=numbered[number].uuid, time=time, **values)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            if count == len(lines):  # the monitor was ended while it wrote
                return
            raise UserError(
                f"{path} is not a trace of GPU readings: line {count}", fix="health.node-K.jsonl of a run"
            ) from error
