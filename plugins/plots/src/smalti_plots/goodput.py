"""Goodput: what the time of a run was spent on, over all its attempts, and how much of it led to steps that count.

The main rank counts, and each step event has the sums of the run so far, in the field `time`. So nothing is missing but the
running step when all processes are killed. When an attempt begins, it adds what the one before has cost: the time until it
began, and the steps that have to be made again.

Sums within an attempt are those of a monotonic clock. Times between attempts are differences of clocks that may be those of two
nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise

from smalti import ExitCode
from smalti.rundir import Event, RunDirectory, read_events_backwards

KINDS = {
    "training": "training",
    "data": "waiting for data",
    "validation": "validation",
    "evaluation": "evaluation",
    "saving": "saving",
    "paused": "waiting for disk space",
    "starting": "starting",
    "restarting": "restarting",
    "skipped": "skipped steps",
    "lost": "lost steps",
    "other": "other",
}
"""What time is spent on, with the words for people."""
_OF_PHASE = {"validating": "validation", "evaluating": "evaluation", "saving": "saving", "paused": "paused"}
_RECENT = 32
"""How many events before the end of an attempt are looked through for the fault that ended it, and for its last sums."""
_ON_PURPOSE = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)
"""After these somebody chose when to go on: the time until then is not that of the run."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What one cause has cost: attempts that it ended, steps made again and their seconds, seconds until the next start."""

    attempts: int = 0
    steps: int = 0
    seconds: float = 0.0
    restarting: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds by kind (`KINDS`), and what was lost by cause: the name of the exit code, with the fault of an accelerator."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    causes: Mapping[str, Lost] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """The share of the time that was spent on steps that were kept; None before the first step."""
        productive = self.seconds.get("training", 0.0)
        return productive / self.total if productive > 0 else None

    def __str__(self) -> str:
        """In one line: "93% of 1h02m training, 4% waiting for data, 3% lost steps (12)"."""
        parts = [(self.seconds.get(kind, 0.0) / (self.total or 1.0), words) for kind, words in KINDS.items()]
        (training, _), *others = parts
        shown = [f"{share:.0%} {words}" for share, words in sorted(others, reverse=True) if share >= 0.005]
        steps = sum(lost.steps for lost in self.causes.values())
        again = [f"{steps} steps were made again"] if steps else []
        return ", ".join([f"{training:.0%} of {_duration(self.total)} training", *shown, *again])

    def as_json(self) -> dict[str, object]:
        return {"share": self.share, "total": self.total, **asdict(self)}

    def as_fields(self) -> dict[str, object]:
        """As the field `time` of an event."""
        causes = {cause: {name: _rounded(value) for name, value in asdict(lost).items()} for cause, lost in self.causes.items()}
        return {**{kind: _rounded(value) for kind, value in self.seconds.items()}, **({"causes": causes} if causes else {})}


def goodput_of(event: Event) -> Goodput | None:
    """The sums in an event; None if it has none."""
    found = event.fields.get("time")
    if not isinstance(found, Mapping):
        return None
    try:
        causes = {str(cause): Lost(**lost) for cause, lost in dict(found.get("causes", {})).items()}
        return Goodput(seconds={kind: float(found[kind]) for kind in KINDS if kind in found}, causes=causes)
    except (TypeError, ValueError):
        return None


def read_goodput(directory: RunDirectory) -> Goodput | None:
    """What the time of a run was spent on, up to its last step or end. None before its first one, and if nobody counted."""
    newest = islice(read_events_backwards(directory.events_file), _RECENT)
    return next((found for event in newest if (found := goodput_of(event)) is not None), None)


class TimeAccount:
    """Counts on the main rank, from the moment when its loop begins."""

    def __init__(self, before: Goodput) -> None:
        """`before` has what was spent until now."""
        self._before = before
        self._begun = time.monotonic()
        self._spent: dict[str, float] = {}
        self._phase = ""
        self._since = self._begun
        self._last = self._begun
        self._saving = 0.0

    def enter(self, phase: str) -> None:
        """Another phase begins, or continues after one within it."""
        now = time.monotonic()
        if kind := _OF_PHASE.get(self._phase):
            self._add(kind, now - self._since)
            self._saving += now - self._since if kind == "saving" else 0.0
        if phase != "training" or self._phase != "compiling":
            self._phase, self._since, self._last = phase, now, now

    def step(self, seconds: float, data_seconds: float, *, skipped: bool) -> None:
        """A step has ended. The first one after compiling has begun is part of the start."""
        self._add("starting" if self._phase == "compiling" else "skipped" if skipped else "training", seconds)
        self._add("data", data_seconds)
        self._last = time.monotonic()
        if self._phase == "compiling":
            self._phase = "training"

    def saved(self, blocked: float) -> None:
        """A checkpoint is complete. The steps beside which it was written have waited for a part of `blocked`."""
        within_steps = max(0.0, blocked - self._saving - (time.monotonic() - self._since if self._phase == "saving" else 0.0))
        self._saving = 0.0
        moved = min(within_steps, self._spent.get("training", 0.0))
        self._add("training", -moved)
        self._add("saving", moved)

    def fail(self) -> None:
        """The attempt has failed: the step that was under way, and what was waited for in it, is lost."""
        if self._phase not in _OF_PHASE:
            self._add("lost", time.monotonic() - self._last)

    def now(self) -> Goodput:
        """The sums so far."""
        spent, now = dict(self._spent), time.monotonic()
        if kind := _OF_PHASE.get(self._phase):
            spent[kind] = spent.get(kind, 0.0) + now - self._since
        spent["other"] = max(0.0, now - self._begun - sum(spent.values()))
        return _plus(self._before, spent)

    def _add(self, kind: str, seconds: float) -> None:
        self._spent[kind] = self._spent.get(kind, 0.0) + seconds


def before_attempt(history: Iterator[Event], step: int, now: float) -> Goodput:
    """What a run has spent until an attempt begins to train at `step`, at the time `now`.

    `history` are its events, the last one first. Only those that this attempt makes again are read, and those after them.
    """
    started: float | None = None
    ended: Event | None = None
    code: float | None = None
    fault = ""
    trail: list[tuple[Event, Goodput]] = []
    for event in history:
        if ended is None and event.text("state") == "starting":  # a launch that did not train
            started = event.time if started is None else started
            code, fault = None, ""
        if code is None and event.text("state") in ("stopped", "finished", "failed") and not trail:
            code = event.number("exit_code")
        if len(trail) < _RECENT:
            fault = fault or event.text("fault")
        found = goodput_of(event)
        if found is None:
            continue
        ended = ended or event
        trail.append((event, found))
        if (event.step or 0) <= step:
            break
    if ended is None:
        return Goodput(seconds={"starting": max(0.0, now - started)} if started is not None else {})
    exit_code = ExitCode(int(code)) if code is not None and int(code) in list(ExitCode) else ExitCode.KILLED
    on_purpose = exit_code in _ON_PURPOSE
    until = now if started is None else started
    steps, training, data = _made_again(trail, step)
    restarting = 0.0 if on_purpose else max(0.0, until - ended.time)
    sums = _plus(
        trail[0][1],
        {
            "training": -training,
            "data": -data,
            "lost": training + data,
            "restarting": restarting,
            "starting": max(0.0, now - until),
        },
    )
    if on_purpose and not steps:
        return sums
    name = exit_code.name.lower() + (f": {fault}" if fault and exit_code is ExitCode.GPU_FAULT else "")
    lost = sums.causes.get(name, Lost())
    lost = Lost(
        attempts=lost.attempts + 1,
        steps=lost.steps + steps,
        seconds=lost.seconds + training + data,
        restarting=lost.restarting + restarting,
    )
    return replace(sums, causes={**sums.causes, name: lost})


def _made_again(trail: list[tuple[Event, Goodput]], step: int) -> tuple[int, float, float]:
    """How many steps after `step` were made that count no more, and the seconds of training and of waiting for data in them.

    `trail` is the last event first. An attempt begins with an event "running" at the step from which it resumed; what its
    predecessors made after that was counted when it began.
    """
    steps, training, data, horizon = 0.0, 0.0, 0.0, float("inf")
    for (later, after), (earlier, before) in pairwise(trail):
        if later.text("state") == "running":
            horizon = min(horizon, later.step or 0)
            continue
        first, last = earlier.step or 0, later.step or 0
        low, high = max(first, step), min(last, horizon)
        if high <= low:
            continue
        part = (high - low) / (last - first)
        steps += high - low
        training += part * (after.seconds.get("training", 0.0) - before.seconds.get("training", 0.0))
        data += part * (after.seconds.get("data", 0.0) - before.seconds.get("data", 0.0))
    return round(steps), max(0.0, training), max(0.0, data)


def _plus(sums: Goodput, more: Mapping[str, float]) -> Goodput:
    added = {kind: sums.seconds.get(kind, 0.0) + more.get(kind, 0.0) for kind in KINDS}
    return replace(sums, seconds={kind: seconds for kind, seconds in added.items() if seconds > 0})


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
