"""What each rank publishes of itself, and what follows from it: who waits for whom, and whether that is a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smalti.system import Process
from smalti_health.hangs.deadlines import Deadlines


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """One rank. Times are in unix seconds: `since` the phase, `active` the last progress, `published` this record.

    `place` is where its main thread is, once it makes no progress; `waits` says that this is a collective call. `p95` is that
    of its latest steps, `forward` the median time of their forward passes. `calls` are its last collective calls
    (`flight_recorder.Call`), `process` is a `Process`, both in JSON's types.
    """

    phase: str
    since: float
    active: float
    published: float
    step: int = 0
    place: str = ""
    waits: bool = False
    p95: float | None = None
    forward: float = 0.0
    done: int | None = None
    total: int | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    process: Mapping[str, Any] = field(default_factory=dict)


def process_of(rank: RankProgress) -> Process:
    """The process of a rank."""
    return Process(**rank.process)


class OwnTime:
    """Translates records of other ranks, whose clocks may differ, into the time of this one.

    What counts is when this rank has seen a record for the first time. For one that it did not look for before, the times say
    how old it is, but at most `longest` seconds: a rank that lives publishes more often.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._seen: dict[int, tuple[float, float, float]] = {}

    def translate(self, rank: int, known: RankProgress, now: float, steady: float) -> RankProgress:
        """A record that was read at the time `now`, which is `steady` by the clock that nobody sets."""
        published, began, looked = self._seen.get(rank, (0.0, 0.0, float("-inf")))
        if published != known.published:
            unknown = steady - looked > self._longest
            began = steady - (min(max(0.0, now - known.published), self._longest) if unknown else 0.0)
        self._seen[rank] = (known.published, began, steady)
        shift = now - (steady - began) - known.published
        return replace(known, published=known.published + shift, active=known.active + shift, since=known.since + shift)


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Ranks without progress. `waiting` are in a collective call, `awaited` are the ones for which they wait.

    `hang`: no awaited rank can be expected to come any more.
    """

    waiting: tuple[int, ...]
    awaited: tuple[int, ...]
    hang: bool


def standstill(ranks: Mapping[int, RankProgress], size: int, deadlines: Deadlines, now: float) -> Standstill:
    """What the published records say. A rank without one is awaited; the deadline of an awaited rank is that of its phase.

    Where all ranks wait, for a network or for each other, each is held to its own deadline. All have made a step if one has.
    """
    p95 = max((known.p95 for known in ranks.values() if known.p95 is not None), default=None)
    waiting = tuple(rank for rank in range(size) if rank in ranks and ranks[rank].waits)
    awaited = tuple(rank for rank in range(size) if rank not in waiting)
    held = awaited or waiting
    hang = bool(held) and all(rank in ranks and _late(ranks[rank], deadlines, now, p95) for rank in held)
    return Standstill(waiting=waiting, awaited=awaited, hang=hang)


def _late(rank: RankProgress, deadlines: Deadlines, now: float, p95: float | None) -> bool:
    """`p95` is for a rank that has published nothing since its first step."""
    seconds = deadlines.seconds(rank.phase, p95=p95 if rank.p95 is None else rank.p95)
    return seconds is not None and now - rank.active > seconds


def described(
    found: Standstill, ranks: Mapping[int, RankProgress], now: float, state: Callable[[int], str] = lambda rank: ""
) -> str:
    """Who waits for whom, since when and for what, in one sentence. `state` returns that of a process, "" if unknown."""
    parts = [_described(rank, ranks.get(rank), now, state(rank)) for rank in found.awaited[:4]]
    if len(found.awaited) > 4:
        parts.append(f"{len(found.awaited) - 4} more")
    if not found.waiting:
        return "; ".join(parts)
    first = ranks[found.waiting[0]]
    who = f"rank {found.waiting[0]} waits" if len(found.waiting) == 1 else f"ranks {_listed(found.waiting)} wait"
    where = f" in {first.place}" if first.place else ""
    since = f"{who}{where}, in phase {first.phase}, for {_duration(now - first.active)}"
    return f"{since}, for {' and '.join(parts)}" if parts else f"{since}, each for the others"


def _described(rank: int, known: RankProgress | None, now: float, state: str) -> str:
    if known is None:
        return f"rank {rank}, of which nothing is known{f' ({state})' if state else ''}"
    done = "" if known.total is None else f" {known.done or 0:,}/{known.total:,}"
    began = time.strftime("%H:%M:%S", time.localtime(known.since))
    facts = [f"in phase {known.phase}{done} since {began}"]
    facts += [f"in step {known.step + 1}"] if known.phase == "training" else []
    facts += [f"without progress for {_duration(now - known.active)}"]
    facts += [f"at {known.place}"] if known.place else []
    facts += [f"its process is {state}"] if state in ("stopped", "tracing-stop", "zombie", "disk-sleep") else []
    return f"rank {rank} ({', '.join(facts)})"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
