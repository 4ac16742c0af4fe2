"""What the pages show of a run, from its events: thinned series, markers, phases, messages."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.rundir import RunDirectory
from smalti.system import load_json
from smalti_webui.runs.following import Follower, Position
from smalti_webui.runs.gpus import Gpu, Gpus
from smalti_webui.runs.images import Sample, images_of
from smalti_webui.runs.thinning import Series

_KEPT = 8
"""Histories that are kept in memory."""
_MARKERS = 500
_MESSAGES = 50
_NOT_SERIES = {"type", "t", "step", "max_steps", "epoch", "samples", "skipped", "time", "node", "rank"}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TITLES = {
    "loss": "Loss",
    "eval_loss": "Loss on held-out images",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "recent_samples_per_second": "Samples per second",
    "seconds": "Seconds per step",
    "data_seconds": "Seconds waiting for data",
    "forward_seconds": "Seconds in the forward pass",
    "peak_memory_mb": "Peak memory in MiB",
    "mfu": "Model FLOP utilisation",
}
"""The series of the core, in the order of the page. Others follow under their own names."""
_HIDDEN = {"smoothed_loss"}
"""The page smooths the loss itself."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Something that happened at a step: "checkpoint", "error", "warning", "resumed"."""

    kind: str
    step: int
    time: float
    text: str


@dataclass(kw_only=True)
class Segment:
    """A part of the latest attempt with one phase. `end` is None while it lasts."""

    phase: str
    begin: float
    end: float | None = None


@dataclass(kw_only=True)
class History:
    """What is known of a run up to `position`. `info` is the last "running" state, `last_step` the last step.

    `faults` are the last events of GPUs, by UUID. `messages`, `faults`, `memory` and `answer` have the fields that pages show,
    whatever the events have; other writers and damaged files may leave some out. `images` are those of the last validation.
    """

    position: Position = field(default_factory=Position)
    series: dict[str, Series] = field(default_factory=dict)
    markers: deque[Marker] = field(default_factory=lambda: deque(maxlen=_MARKERS))
    segments: list[Segment] = field(default_factory=list)
    messages: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    last_step: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    answer: dict[str, Any] | None = None
    images: list[Sample] = field(default_factory=list)
    attempts: int = 0
    latest: float = 0.0

    def add(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        kind, when, step = event.get("type"), event.get("t"), event.get("step")
        if not isinstance(kind, str) or not isinstance(when, int | float) or not math.isfinite(when):
            return
        if step is not None and not isinstance(step, int):
            return
        self.latest = max(self.latest, float(when))
        match kind:
            case "step":
                self._step(event, step or 0, float(when))
            case "metric":
                self._measure_all(event, step or 0, float(when))
            case "eval":
                self._evaluated(event, step or 0, float(when))
            case "phase":
                self._enter(str(event.get("phase", "")), event, float(when))
            case "state":
                self._state(event, step, float(when))
            case "checkpoint":
                self._mark("checkpoint", step, float(when), str(event.get("path", "")))
            case "memory":
                bounds = {name: _number(event.get(name)) for name in ("measured", "least", "most")}
                self.memory = {**bounds, **_texts(event, "device")}
            case "control_ack":
                accepted = event.get("accepted") is True
                self.answer = {**_texts(event, "kind", "message"), "accepted": accepted, "t": float(when)}
            case "sample":
                self.images = list(images_of(event.get("images"), step or 0)) or self.images
            case "error" | "warning" | "health":
                text = str(event.get("message") or event.get("error") or "")
                self.messages.append({"type": kind, "t": float(when), "message": text})
                self._mark("error" if kind == "error" else "warning", step, float(when), str(event.get("message", "")))
                if kind == "health":
                    names = _texts(event, "fault", "message", "device", "host")
                    self.faults[str(event.get("uuid") or event.get("device") or "")] = names

    def _evaluated(self, event: dict[str, Any], step: int, when: float) -> None:
        """The curves have the names of the metrics: those of a loss with factors are named after them."""
        factors = event.get("factors")
        name = "/".join(["eval_loss", *(["+".join(map(str, factors))] if isinstance(factors, list) and factors else [])])
        levels, plain = (each if isinstance(each := event.get(key), dict) else {} for key in ("by_timestep", "plain"))
        finite = [loss for loss in map(_number, plain.values()) if loss is not None]
        self._measure_all({name: event.get("loss")}, step, when)
        self._measure_all({f"{name}/t={timestep}": loss for timestep, loss in levels.items()}, step, when)
        self._measure_all({"eval_loss": sum(finite) / len(finite)} if finite else {}, step, when)
        self._measure_all({f"eval_loss/t={timestep}": loss for timestep, loss in plain.items()}, step, when)

    def _step(self, event: dict[str, Any], step: int, when: float) -> None:
        self._measure_all(event, step, when)
        self.last_step = event
        if self.segments and self.segments[-1].phase != "training":
            begun = when - (_number(event.get("seconds")) or 0.0)
            if begun >= self.segments[-1].begin:  # otherwise the phase has begun since, and the step is reported late
                self._begin("training", begun)

    def _state(self, event: dict[str, Any], step: int | None, when: float) -> None:
        state = event.get("state")
        if state == "starting":
            self.attempts += 1
            self.segments = [Segment(phase="starting", begin=when)]
        elif state == "running":
            self.info = event
            if step:
                self._mark("resumed", step, when, f"resumed from step {step}")
            for series in self.series.values():
                series.rewind(step or 0)
            self._begin("training", when)
        elif self.segments:
            self.segments[-1].end = when

    def _enter(self, phase: str, event: dict[str, Any], when: float) -> None:
        begun = _number(event.get("begun"))
        if self.segments and self.segments[-1].phase != phase:
            # A phase that began before the one within it continues: its end is not reported, but it is not later than this.
            known = begun is not None and self.segments[-1].begin <= begun <= when
            self._begin(phase, begun if known and begun is not None else when)

    def _begin(self, phase: str, when: float) -> None:
        if self.segments and self.segments[-1].end is None:
            self.segments[-1].end = when
        self.segments.append(Segment(phase=phase, begin=when))
        if len(self.segments) > 4 * _MARKERS:
            del self.segments[1 : 2 * _MARKERS]

    def _measure_all(self, event: dict[str, Any], step: int, when: float) -> None:
        """Add the numbers of an event to their series."""
        for name, value in event.items():
            if name in _NOT_SERIES:
                continue
            number = value if type(value) is float else _number(value)  # most are, and this runs for every field of every step
            if number is not None:
                self._measure(name, step, when, number)

    def _measure(self, name: str, step: int, when: float, value: float) -> None:
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = Series()
        series.add(step, when, value)

    def _mark(self, kind: str, step: int | None, when: float, text: str) -> None:
        at = step if step is not None else int(self.last_step.get("step") or 0)
        self.markers.append(Marker(kind=kind, step=at, time=when, text=text))

    # --- what pages show --------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The series in the order of the page."""
        known = [name for name in TITLES if name in self.series]
        return known + sorted(name for name in self.series if name not in TITLES and name not in _HIDDEN)


class Followed:
    """The history of a run, which is continued."""

    def __init__(self, directory: RunDirectory) -> None:
        self.lock = threading.RLock()
        self.history = History()
        self.gpus: list[Gpu] = []
        self._gpus = Gpus(directory)
        self._directory = directory
        self._follower = Follower(directory)
        self._identity: object = None

    def update(self) -> None:
        with self.lock:
            self.gpus = self._gpus.read()
            record = self._directory.record()
            identity = record.id if record else None
            if identity != self._identity:
                self._identity, self._follower, self.history = identity, Follower(self._directory), History()
            while True:
                batch = self._follower.read(1 << 20)
                if batch.replaced:
                    self._follower, self.history = Follower(self._directory), History()
                    continue
                for line in batch.lines:
                    self.history.add(parse(line))
                self.history.position = batch.position
                if not batch.more:
                    return


class Histories:
    """The histories of the runs that were looked at last. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, Followed] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, directory: RunDirectory) -> Followed:
        """The history of a run, read up to now. Hold its `lock` while it is used."""
        with self._lock:
            followed = self._kept.pop(directory.path, None) or Followed(directory)
            self._kept[directory.path] = followed
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        followed.update()
        return followed


def parse(line: bytes) -> dict[str, Any]:
    """The fields of a line; those of a line that is not an event are its type "malformed" and its text."""
    try:
        found = load_json(line)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("type"), str):
        return found
    return {"type": "malformed", "t": 0.0, "step": None, "line": line.decode("utf-8", "replace")}


def _texts(event: dict[str, Any], *names: str) -> dict[str, str]:
    """These fields as text; empty if the event has none."""
    return {name: str(event.get(name) or "") for name in names}


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
