"""What the overview of a run shows: numbers, what its time was spent on, its latest attempt by phases, GPUs, warnings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smalti.rundir import RunDirectory, Summary
from smalti_plots.goodput import KINDS, read_goodput
from smalti_webui.runs.gpus import Gpu
from smalti_webui.runs.history import History, Segment
from smalti_webui.runs.images import Sample

_BINS = 240
_IMAGES = 6
_EMPTY = ""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of the phase timeline in parts of its whole width."""

    phase: str
    left: float
    width: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Overview:
    """`spent` is (title, seconds, share) of all attempts. `phases` are those of the latest attempt with their seconds."""

    numbers: list[tuple[str, float | None, str]]
    spent: list[tuple[str, float, float]]
    blocks: list[Block]
    phases: list[tuple[str, float]]
    begun: float | None
    ended: float | None
    attempts: int
    facts: list[tuple[str, str]]
    gpus: list[Gpu]
    faults: dict[str, dict[str, Any]]
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None
    memory: dict[str, Any] | None
    images: list[Sample]
    has_loss: bool


def overview_of(history: History, gpus: Sequence[Gpu], summary: Summary, now: float | None = None) -> Overview:
    """The overview of a run, now."""
    step, info = history.last_step, history.info
    running = summary.status.condition == "running"
    end = (time.time() if now is None else now) if running else history.latest
    segments = history.segments
    blocks = timeline(segments, end)
    sums: dict[str, float] = {}
    for segment in segments:
        sums[segment.phase] = sums.get(segment.phase, 0.0) + max(0.0, (segment.end or end) - segment.begin)
    goodput = read_goodput(RunDirectory(summary.path))
    total = goodput.total if goodput else 0.0
    return Overview(
        numbers=[
            ("Loss, smoothed", summary.loss, ""),
            ("Learning rate", _number(step.get("learning_rate")), ""),
            ("Samples per second", summary.samples_per_second, ""),
            ("Gradient norm", _number(step.get("grad_norm")), ""),
            ("Peak memory", _number(step.get("peak_memory_mb")), "MiB"),
            ("Model FLOP utilisation", _number(step.get("mfu")), ""),
        ],
        spent=[(KINDS[kind], seconds, seconds / total) for kind, seconds in goodput.seconds.items()]
        if goodput and total
        else [],
        blocks=blocks,
        phases=sorted(sums.items(), key=lambda item: -item[1]),
        begun=segments[0].begin if segments else None,
        ended=None if running or not segments else end,
        attempts=history.attempts,
        facts=_facts(info),
        gpus=list(gpus),
        faults=history.faults,
        messages=list(history.messages)[::-1][:8],
        answer=history.answer,
        memory=history.memory,
        images=history.images[:_IMAGES],
        has_loss="loss" in history.series,
    )


def timeline(segments: list[Segment], end: float) -> list[Block]:
    """At most `_BINS` pieces: each part of the width has the phase that took most of its time."""
    if not segments:
        return []
    begin = segments[0].begin
    whole = max(end - begin, 1e-6)
    bins: list[dict[str, float]] = [{} for _ in range(_BINS)]
    for segment in segments:
        first, last = ((edge - begin) / whole * _BINS for edge in (segment.begin, segment.end or end))
        for place in range(max(0, math.floor(first)), min(_BINS, math.ceil(last))):
            part = min(last, place + 1) - max(first, place)
            bins[place][segment.phase] = bins[place].get(segment.phase, 0.0) + part
    names = [max(each, key=lambda name: each[name]) if each else _EMPTY for each in bins]
    blocks: list[Block] = []
    place = 0
    while place < _BINS:
        after = next((other for other in range(place, _BINS) if names[other] != names[place]), _BINS)
        if names[place]:
            width = (after - place) / _BINS
            blocks.append(Block(phase=names[place], left=place / _BINS, width=width, seconds=width * whole))
        place = after
    return blocks


def _facts(info: dict[str, Any]) -> list[tuple[str, str]]:
    shown = (
        ("family", "Family"),
        ("strategy", "Strategy"),
        ("parameters", "Parameters"),
        ("trainable", "Trained parameters"),
        ("effective_batch", "Effective batch"),
    )
    return [(title, _plain(info[name])) for name, title in shown if name in info]


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
