"""The trace of a node in the run directory: bounded, so that it never fills a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from smalti_health.policy.readings import Device, Reading
from smalti_health.policy.trace import Encoder

LARGEST = 8 << 20
"""Bytes of a file; one older file of this size is kept beside it."""


def trace_files(directory: Path, node: int) -> tuple[Path, Path]:
    """The file before the current one, and the current one."""
    return directory / f"health.node-{node}.1.jsonl", directory / f"health.node-{node}.jsonl"


class TraceFile:
    """Appends to the trace. A file that cannot be written is reported once to `complain`, and then left alone."""

    def __init__(self, directory: Path, node: int, complain: Callable[[str], None], largest: int = LARGEST) -> None:
        self._old, self._current = trace_files(directory, node)
        self._complain = complain
        self._largest = largest
        self._file: TextIO | None = None
        self._encoder: Encoder | None = None
        self._devices: tuple[Device, ...] = ()
        self._failed = False

    def append(self, devices: Sequence[Device], readings: Sequence[Reading]) -> None:
        if self._failed:
            return
        try:
            if self._file is None or tuple(devices) != self._devices or self._file.tell() > self._largest:
                self._begin(tuple(devices))
            assert self._file is not None
            assert self._encoder is not None
            self._file.write("".join(f"{self._encoder.line(reading)}\n" for reading in readings))
            self._file.flush()
        except OSError as error:
            self._failed = True
            self._complain(f"the trace {self._current} cannot be written any more: {error}")

    def _begin(self, devices: tuple[Device, ...]) -> None:
        """Another file, or another part of this one: with all values again."""
        if self._file is not None:
            self._file.close()
        if self._current.exists() and self._current.stat().st_size > self._largest:
            self._current.replace(self._old)
        self._file = self._current.open("a")
        self._devices, self._encoder = devices, Encoder(devices)
        self._file.write("".join(f"{line}\n" for line in self._encoder.head()))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
