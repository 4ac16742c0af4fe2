"""The log of a run: its events as lines, with filters, the last ones first read; and the output of launches by the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Any

from smalti.rundir import RunDirectory
from smalti_webui.runs.following import STEP_LINES, backwards
from smalti_webui.runs.history import parse

LEVELS = ("error", "warning", "info", "steps")
LINES = 500
_BYTES = 64 << 20
"""How far back one request reads."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the log. `node` and `rank` are "" where the event names none."""

    time: float
    level: str
    kind: str
    text: str
    step: int | None
    node: str = ""
    rank: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """What is shown: a level with all that are more severe, a node, a rank, a text in any case. Empty: everything."""

    level: str = "info"
    node: str = ""
    rank: str = ""
    text: str = ""

    def admits(self, line: Line) -> bool:
        admitted = LEVELS.index(line.level) <= LEVELS.index(self.level if self.level in LEVELS else "info")
        return (
            admitted
            and (not self.node or line.node == self.node)
            and (not self.rank or line.rank == self.rank)
            and (not self.text or self.text.casefold() in f"{line.kind} {line.text} {line.detail}".casefold())
        )


def last_lines(directory: RunDirectory, wanted: Filter, count: int = LINES) -> tuple[list[Line], bool]:
    """The last lines that a filter admits, oldest first, and whether there may be earlier ones."""
    found: list[Line] = []
    files = [(0 if path == directory.events_file else _node(path), path) for path in directory.event_files()]
    budget = _Budget(_BYTES)
    for _, line in merge(*(_lines(path, node, wanted, budget) for node, path in files), key=lambda pair: -pair[0]):
        if len(found) == count:
            return found[::-1], True
        if wanted.admits(line):
            found.append(line)
    return found[::-1], budget.exceeded


@dataclass
class _Budget:
    """How many bytes may still be read."""

    left: int
    exceeded: bool = False


def _lines(path: Path, node: int, wanted: Filter, budget: _Budget) -> Iterator[tuple[float, Line]]:
    """Lines with their times, the last one first. A time after that of a later line counts as the latter's."""
    earliest = float("inf")
    for _, raw in backwards(path):
        budget.left -= len(raw)
        if budget.left < 0:
            budget.exceeded = True
            return
        if raw.startswith(STEP_LINES) and wanted.level != "steps":
            continue
        line = line_of(parse(raw), node)
        earliest = min(earliest, line.time or earliest)
        yield earliest, line


def line_of(event: dict[str, Any], node: int = 0) -> Line:
    """An event as a line."""
    kind = str(event.get("type"))
    step, when = event.get("step"), event.get("t")
    level, text = _text(kind, event)
    own = event.get("node")
    return Line(
        time=float(when) if isinstance(when, int | float) else 0.0,
        level=level,
        kind=kind,
        text=text,
        step=step if isinstance(step, int) else None,
        node=str(own if isinstance(own, int) else node or ""),
        rank=str(event.get("rank", "")),
        detail=str(event.get("traceback") or ""),
    )


def _text(kind: str, event: dict[str, Any]) -> tuple[str, str]:
    """Level and text of an event."""
    text = str(event.get("message") or "")
    match kind:
        case "error":
            return "error", f"{event.get('error', '')}: {text}"
        case "warning" | "health" | "malformed":
            return "warning", text or str(event.get("line", ""))[:500]
        case "state":
            failed = event.get("state") == "failed"
            return "error" if failed else "info", f"{event.get('state', '')} {text}".strip()
        case "step":
            return "steps", _step_text(event)
        case "phase":
            done, total = event.get("done"), event.get("total")
            return "info", f"{event.get('phase')}" + (f" {done or 0}/{total} {event.get('unit', '')}" if total else "")
        case "checkpoint":
            return "info", f"saved {event.get('path')}"
        case "sample":
            return "info", f"generated {event.get('overview') or event.get('grid')}"
        case "eval":
            factors = found if isinstance(found := event.get("factors"), list) else []
            of = "".join(f" times {name}" for name in factors)
            return "info", f"loss {event.get('loss')}{of} on held-out images"
        case "control_ack":
            return "info", f"{event.get('kind')} {'accepted' if event.get('accepted') else 'refused'}: {text}"
    rest = {name: value for name, value in event.items() if name not in ("type", "t", "step")}
    return "info", text or json.dumps(rest)[:500]


def _step_text(event: dict[str, Any]) -> str:
    shown = ("loss", "smoothed_loss", "learning_rate", "grad_norm", "seconds")
    return " ".join(
        f"{name} {event[name]:.4g}" if isinstance(event[name], int | float) else f"{name} {event[name]}"
        for name in shown
        if name in event
    )


def _node(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
