"""A small curve of the loss from some places of a long file, so that it costs the same for every run."""

from __future__ import annotations

import math
import os
from pathlib import Path

from smalti.system import load_json, open_regular
from smalti_webui.runs.following import STEP_LINES

_PIECE = 8192
_WHOLE = 1 << 17
POINTS = 40


def losses(path: Path, points: int = POINTS) -> list[tuple[int, float]]:
    """The smoothed loss by step at up to `points` places of an events file, oldest first. A short file is read as a whole."""
    try:
        file = open_regular(path)
    except OSError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE:
            steps = _rising([step for line in file.read().split(b"\n")[:-1] if (step := _loss(line))])
            stride = max(1, -(-len(steps) // points))
            return steps[::-1][::stride][::-1]
        found: list[tuple[int, float]] = []
        for place in range(points):
            file.seek((size - _PIECE) * place // (points - 1))
            lines = file.read(_PIECE).split(b"\n")[1:-1]
            if place == points - 1:
                lines.reverse()
            if step := next((step for line in lines if (step := _loss(line))), None):
                found.append(step)
    return _rising(found)


def _rising(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Without what was made again after a resume: a later line of an earlier step replaces those from there on."""
    kept: list[tuple[int, float]] = []
    for step, loss in found:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, loss))
    return kept


def _loss(line: bytes) -> tuple[int, float] | None:
    if not line.startswith(STEP_LINES):
        return None
    try:
        event = load_json(line)
    except ValueError:
        return None
    step, loss = event.get("step"), event.get("smoothed_loss", event.get("loss"))
    valid = isinstance(step, int) and isinstance(loss, int | float) and not isinstance(loss, bool) and math.isfinite(loss)
    return (step, float(loss)) if valid else None
