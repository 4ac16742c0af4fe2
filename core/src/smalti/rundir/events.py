"""The events of a run: lines of JSON that one process appends and any process may read at any time.

Every line is an object with `type`, `t` (unix seconds) and `step` (null if there is none); the rest depends on the type. A line
is valid once its newline is written, so a reader needs no lock and only has to remember a byte offset. Numbers that JSON does
not have are the strings "NaN", "Infinity" and "-Infinity".

Loss and duration of single steps vary too much to be read: they are shown smoothed, alike on the console and in `smalti run`.
Importing this module imports no torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, cast

from smalti.system import load_json, open_regular

EventKind = (
    Literal["state", "phase", "step", "metric", "sample", "eval", "checkpoint", "memory"]
    | Literal["log", "warning", "health", "error", "control_ack", "generation"]
)
MALFORMED = "malformed"
"""The kind of a line that is not an event, for readers. Its text is in the field `line`."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line, at byte `offset` of its file. The next line begins at byte `end`."""

    kind: str
    time: float
    step: int | None
    fields: Mapping[str, object]
    offset: int
    end: int

    def number(self, name: str) -> float | None:
        """A field as a number, also if it is not finite; None if it is absent or not a number."""
        value = self.fields.get(name)
        return _NON_FINITE.get(value) if isinstance(value, str) else _number(value)

    def text(self, name: str) -> str:
        """A field as text; "" if it is absent or not text."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def to_json(self) -> str:
        return to_json({"type": self.kind, "t": self.time, "step": self.step, **self.fields})


class EventWriter:
    """The only writer of an events file. Thread-safe.

    Each event is a single append. If the disk is full, events are lost, one message is logged, and a `warning` event counts the
    lost events as soon as there is space again: a full disk must not end training. Nothing is written while `may_write` is not
    true.
    """

    def __init__(self, path: Path, may_write: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._may_write = may_write
        self.last_step = 0
        self.mask: Callable[[object], object] = lambda value: value
        """Applied to every event, so that no secret is written."""
        self.extras: list[Callable[[EventKind, int | None, Mapping[str, object]], Mapping[str, object]]] = []
        """Of plugins: each takes the kind, the step and the fields of an event, and returns further fields. In any thread."""
        self._lock = threading.Lock()
        self._lost = 0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = _ends_torn(self._file)

    def append(self, kind: EventKind, /, *, step: int | None = None, **fields: object) -> None:
        """Append one event. Fields may be numbers, text, paths, None, and sequences and mappings of these."""
        if reserved := fields.keys() & {"type", "t"}:
            raise ValueError(f"reserved fields of an event: {', '.join(sorted(reserved))}")
        for extra in self.extras:
            fields |= extra(kind, step, fields)
        line = to_json({"type": kind, "t": time.time(), "step": step, **cast(dict[str, object], self.mask(fields))})
        may_write = self._may_write()
        with self._lock:
            self.last_step = max(self.last_step, step or 0)  # a checkpoint is reported some steps after its own
            if not may_write or not self._write(line) or not self._lost:
                return
            lost, self._lost = self._lost, 0
            self._write(
                to_json({"type": "warning", "t": time.time(), "step": step, "message": f"{lost} events before this were lost"})
            )

    def move(self, path: Path, last: Mapping[str, object] | None = None) -> None:
        """Continue in the file `path`, to which all events are copied if it does not exist. Raises OSError.

        `last` has the fields of a final `state` event for the present file.
        """
        with self._lock:
            if not path.exists():
                draft = path.with_name(f".{path.name}.{os.getpid()}")
                with draft.open("wb") as copy:
                    _copy(self._file, copy)
                draft.replace(path)
            if last is not None:
                self._write(to_json({"type": "state", "t": time.time(), "step": self.last_step or None, **last}))
            os.close(self._file)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self.path, self._torn = path, _ends_torn(self._file)

    def close(self) -> None:
        with self._lock:
            os.close(self._file)

    def _write(self, line: str) -> bool:
        """Append a line. An incomplete line that a crash or a full disk left is terminated first."""
        data = ("\n" + line + "\n" if self._torn else line + "\n").encode("ascii")
        reason = "short write"
        try:
            written = os.write(self._file, data)
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        if written == len(data):
            self._torn = False
            return True
        self._torn = self._torn or written > 0
        if not self._lost:
            _log.warning("%s: %s; the run continues, but events are lost", self.path, reason)
        self._lost += 1
        return False


def read_events(path: Path, offset: int = 0) -> Iterator[Event]:
    """The complete lines of a file from byte `offset` on, which must be 0 or an event's `end`. Nothing if there is no file."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            if event := _parse(line[:-1], offset):
                yield event
            offset += len(line)


def read_events_backwards(path: Path, block: int = 1 << 16) -> Iterator[Event]:
    """The complete lines of a file, last one first: the end of a long history without reading the rest.

    Reads `block` bytes at a time, and more of a line that is longer.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        start = file.seek(0, os.SEEK_END)
        rest = b""
        while start > 0:
            size = min(block, start)
            start -= size
            file.seek(start)
            rest = file.read(size) + rest
            # The first line may begin before this block; the last one has no newline yet, or is empty.
            first, *pieces = rest.split(b"\n")
            if len(pieces) < 2:
                block *= 2  # a long line costs linear time
            if not pieces:
                continue
            end = start + len(rest) - len(pieces.pop())
            for line in reversed(pieces):
                end -= len(line) + 1
                if event := _parse(line, end):
                    yield event
            rest = first + b"\n"
        if rest.endswith(b"\n") and (event := _parse(rest[:-1], 0)):
            yield event


def complete_size(path: Path) -> int:
    """The byte at which the last complete line ends. 0 if there is no file."""
    last = next(read_events_backwards(path), None)
    return last.end if last else 0


def _parse(line: bytes, offset: int) -> Event | None:
    """One line without its newline; None for an empty one, which can follow an incomplete line."""
    if not line:
        return None
    end = offset + len(line) + 1
    text = line.decode("utf-8", "replace")
    try:
        fields: object = load_json(text)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        kind, when, step = fields.pop("type", None), _number(fields.pop("t", None)), fields.pop("step", None)
        if isinstance(kind, str) and when is not None and (step is None or isinstance(step, int)):
            return Event(kind=kind, time=when, step=step, fields=fields, offset=offset, end=end)
    return Event(kind=MALFORMED, time=0.0, step=None, fields={"line": text}, offset=offset, end=end)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _copy(source: int, target: BinaryIO) -> None:
    offset = 0
    while piece := os.pread(source, 1 << 20, offset):
        offset += target.write(piece)


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def to_json(value: object, indent: int | None = None) -> str:
    """Strict JSON in ASCII: any text can be written, and no character can be split."""
    return json.dumps(_plain(value), separators=(",", ":" if indent is None else ": "), indent=indent, allow_nan=False)


def _plain(value: object) -> object:
    """The value in types that JSON has."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    raise TypeError(f"an event cannot hold a {type(value).__name__}: {value!r}")


LOSS_KEPT = 0.95
"""Weight of a step relative to the next one: a mean over about the last 20 steps."""


class Throughput:
    """The recent speed of a run: the weight of older time halves every `half_life` seconds.

    The first step includes compilation and warm-up, so it counts only until the second one.
    """

    def __init__(self, half_life: float = 30.0) -> None:
        self._half_life = half_life
        self._updates = 0
        self._seconds = self._samples = 0.0

    def update(self, *, seconds: float, samples: float) -> None:
        """Add a step."""
        self._updates += 1
        keep = 0.0 if self._updates == 2 else 0.5 ** (seconds / self._half_life)
        self._seconds = self._seconds * keep + seconds
        self._samples = self._samples * keep + samples

    @property
    def samples_per_second(self) -> float | None:
        """None before the first step."""
        return self._samples / self._seconds if self._seconds > 0 else None


class SmoothedMetrics:
    """Smoothed loss and speed of the recent steps."""

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._sum = self._weight = 0.0
        self._updated = time.monotonic()

    def update(self, loss: float, samples: int) -> tuple[float, float | None]:
        """Add a step. Returns the loss and the samples per second to display.

        A loss that is not finite is returned as it is and does not affect later values.
        """
        now = time.monotonic()
        self._throughput.update(seconds=now - self._updated, samples=samples)
        self._updated = now
        if not math.isfinite(loss):
            return loss, self._throughput.samples_per_second
        self._sum = self._sum * LOSS_KEPT + loss
        self._weight = self._weight * LOSS_KEPT + 1
        return self._sum / self._weight, self._throughput.samples_per_second


def seconds_for(steps: int, samples: float, samples_per_second: float | None) -> float | None:
    """How long `steps` with `samples` each will take; None if the speed is unknown."""
    return steps * samples / samples_per_second if samples_per_second else None
