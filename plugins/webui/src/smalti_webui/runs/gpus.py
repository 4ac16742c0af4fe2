"""The GPUs of a run as smalti-health has read them last, from its files in the run directory (docs/health.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.rundir import RunDirectory
from smalti.system import load_json
from smalti_webui.runs.following import complete_lines

_FILE = re.compile(r"health\.node-(\d+)\.jsonl")
SHOWN = (
    ("temperature", "Temperature", "°C"),
    ("memory_temperature", "Memory temperature", "°C"),
    ("memory_used_percent", "Memory", "%"),
    ("clock", "Clock", "MHz"),
    ("ecc_uncorrected", "Uncorrected ECC errors", ""),
    ("ecc_corrected", "Corrected ECC errors", ""),
)
"""What a card shows: the key of the file, its title and its unit."""


@dataclass(kw_only=True)
class Gpu:
    """A GPU. `values` are its last readings, `time` is when they were read."""

    node: int
    name: str
    uuid: str
    time: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> list[tuple[str, float, str]]:
        found = ((title, self.values.get(key), unit) for key, title, unit in SHOWN)
        return [(title, value, unit) for title, value, unit in found if isinstance(value, int | float)]


@dataclass(kw_only=True)
class _File:
    identity: int
    offset: int = 0
    numbered: list[Gpu] = field(default_factory=list)


class Gpus:
    """The GPUs of all nodes of a run. Reads what was added since the last time."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._files: dict[Path, _File] = {}

    def read(self) -> list[Gpu]:
        """All GPUs, by node. Empty where smalti-health does not watch the run."""
        for path in sorted(self._directory.path.glob("health.node-*.jsonl")):
            if found := _FILE.fullmatch(path.name):
                self._continue(path, int(found[1]))
        return [gpu for _, each in sorted(self._files.items()) for gpu in each.numbered]

    def _continue(self, path: Path, node: int) -> None:
        try:
            identity = path.stat().st_ino
        except OSError:
            return
        known = self._files.get(path)
        if known is None or known.identity != identity:  # the file was full, and another one has begun
            known = self._files[path] = _File(identity=identity)
        while True:
            lines, known.offset, more = complete_lines(path, known.offset)
            for line in lines:
                _add(known, node, line)
            if not more:
                return


def _add(file: _File, node: int, line: bytes) -> None:
    """Take in a line: a GPU, or what has changed of one."""
    try:
        found = load_json(line)
        if device := found.get("device"):
            if any(gpu.uuid == device["uuid"] for gpu in file.numbered):  # the monitor was started again
                file.numbered = []
            file.numbered.append(Gpu(node=node, name=str(device.get("name", "")), uuid=str(device["uuid"])))
            return
        gpu = file.numbered[found.pop("g")]
        gpu.time = float(found.pop("t"))
        gpu.values.update(found)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return
