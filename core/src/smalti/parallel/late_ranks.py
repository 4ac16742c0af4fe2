"""How long a rank waits in a collective call for those that come late: as long as they work.

Each rank publishes a sign of life beside the process group, with what it does. A rank that works alone for longer than
`--process_group_timeout` (it encodes, downloads, runs a hook) therefore does not end the run. A rank that shows no sign of life
for that long does, and so does one that makes no progress for that long, or for as long as a plugin says (`describe_work`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

from smalti.parallel.rank_boards import ProgressBoard
from smalti.rundir import Phases
from smalti.system import seconds_without_progress

_SECONDS = 5.0
"""How often a rank gives a sign of life, at most: a request to the store each."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What a rank does: `doing` as text, and for how many seconds it has made no progress.

    After `limit` seconds without progress, other ranks need not wait for it; None for no limit.
    """

    doing: str = ""
    idle: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class SignOfLife:
    """What a rank publishes: a number that changes each time, its work, and how many collective calls it has begun."""

    number: int
    calls: int
    work: RankWork = field(default_factory=RankWork)

    @classmethod
    def parse(cls, text: str) -> SignOfLife:
        values = json.loads(text)
        return cls(number=values["number"], calls=values["calls"], work=RankWork(**values["work"]))


Thread = Literal["training", "saving"]
"""Which thread of a rank makes collective calls: that of the loop, or the one that saves while the loop trains."""
_begun = time.monotonic()
_descriptions: dict[Thread, Callable[[], RankWork]] = {}


def describe_work(describe: Callable[[], RankWork], thread: Thread = "training") -> None:
    """Let other ranks know what this thread does. `describe` is called in another thread, several times a minute.

    Until then a rank has to come within the time-out.
    """
    _descriptions[thread] = describe


def describe_phases(phases: Phases) -> None:
    """Let other ranks know in which phase this rank is. After the time-out without progress they need not wait for it."""

    def work() -> RankWork:
        idle = min(time.monotonic() - phases.active_at, seconds_without_progress())
        return RankWork(doing=str(phases.current or "starting"), idle=idle, limit=0)

    describe_work(work)
    describe_work(lambda: RankWork(doing="saving", idle=seconds_without_progress(), limit=0), "saving")


def _work_of(thread: Thread) -> RankWork:
    if (describe := _descriptions.get(thread)) is not None:
        return describe()
    return RankWork(doing="starting", idle=time.monotonic() - _begun, limit=0)


class Presence:
    """The signs of life of this rank, and those of the others. `timeout` is that of the process group, in seconds.

    `thread` is the one that makes the calls.
    """

    def __init__(self, rank: int, size: int, timeout: float, thread: Thread = "training") -> None:
        self._thread = thread
        self._prefix = f"smalti/presence/{thread}"
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._calls = 0
        self._over = threading.Event()
        self._board: ProgressBoard | None = None

    def start(self) -> None:
        """Give signs of life from now on. The process group exists."""
        board = ProgressBoard.create(self.rank, self._prefix)
        assert board is not None, "there is a process group"
        threading.Thread(target=self._publish, args=(board,), name="smalti-presence", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def begin_call(self) -> LateRanks:
        """This rank begins a collective call, which all ranks make in the same order."""
        self._calls += 1
        return LateRanks(self, self._calls)

    def read(self) -> dict[int, SignOfLife]:
        """The latest sign of life of each rank, as far as the store answers. For the thread that makes collective calls."""
        if self._board is None:
            self._board = ProgressBoard.create(self.rank, self._prefix)
        found: dict[int, SignOfLife] = {}
        for rank, text in self._board.read(self.size).items() if self._board is not None else ():
            with suppress(ValueError, TypeError, KeyError):  # of another version
                found[rank] = SignOfLife.parse(text)
        return found

    def _publish(self, board: ProgressBoard) -> None:
        number = 0
        while True:
            number += 1
            sign = SignOfLife(number=number, calls=self._calls, work=_work_of(self._thread))
            board.publish(json.dumps(asdict(sign)))
            if self._over.wait(min(_SECONDS, self.timeout / 10)):
                return


class LateRanks:
    """The ranks for which this one waits in its collective call number `call`, which begins now."""

    def __init__(self, presence: Presence, call: int) -> None:
        self._presence = presence
        self._call = call
        self._begun = time.monotonic()
        self._look_at = self._begun + presence.timeout / 2
        self._seen: dict[int, tuple[int, float]] = {}
        self._joined_at: float | None = None

    def given_up(self) -> str:
        """Why this rank should wait no longer; "" as long as it should. Cheap; looks at the others now and then.

        By this rank's own clock: a sign of life is a number that has changed since this rank has looked.
        """
        now, timeout = time.monotonic(), self._presence.timeout
        if now < self._look_at:
            return ""
        self._look_at = now + timeout / 10
        signs = self._presence.read()
        others = [rank for rank in range(self._presence.size) if rank != self._presence.rank]
        for rank in others:
            number = signs[rank].number if rank in signs else 0
            if self._seen.get(rank, (-1, 0.0))[0] != number:
                self._seen[rank] = (number, now)
        if now - self._begun < timeout:
            return ""
        silent = [rank for rank in others if now - self._seen[rank][1] >= timeout / 2]
        late = [rank for rank in others if rank not in signs or signs[rank].calls < self._call]
        stuck = [rank for rank in late if rank in signs and _is_stuck(signs[rank].work, timeout)]
        if silent or stuck:
            return "; ".join(
                [*(_silence(rank, signs, timeout) for rank in silent), *(_standstill(rank, signs) for rank in stuck)]
            )
        if late:
            self._joined_at = None
            return ""
        self._joined_at = self._joined_at or now
        return "" if now - self._joined_at < timeout / 2 else "all ranks wait for each other: their messages do not arrive"


def _is_stuck(work: RankWork, timeout: float) -> bool:
    return work.limit is not None and work.idle > max(work.limit, timeout)


def _silence(rank: int, signs: dict[int, SignOfLife], timeout: float) -> str:
    doing = signs[rank].work.doing if rank in signs else ""
    return f"rank {rank} has shown no sign of life for {timeout:.0f} s{f' (last: {doing})' if doing else ''}"


def _standstill(rank: int, signs: dict[int, SignOfLife]) -> str:
    work = signs[rank].work
    return f"rank {rank} has made no progress for {work.idle:.0f} s ({work.doing})"
