"""The processes of all ranks, known to each other, so that those who are left can say who is gone, and who saves.

When the group is broken, each rank that notices says so on a board beside the group (the store through which the ranks met),
breaks its own connections, so that nobody waits for it, and looks who else has answered: the roll call. Nothing of this runs
before something has failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from smalti.errors import ExitCode, UserError
from smalti.parallel.gloo import BrokenGroupError, break_all_connections, is_connection_error
from smalti.parallel.protocol import Communicator
from smalti.system import Process, describe, exit_code_of, write_exit_report

T = TypeVar("T")

_TIMEOUT = 10.0
"""Seconds in which a rank that can answer has done so; it may have to come out of a long computation first."""
_BOARD_SECONDS = 5.0
_GLANCE = 0.05
_ALARM = "lost"
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class LostRankError(UserError):
    """Another rank is gone, hangs or has failed, so this one cannot go on.

    `saved` tells of the checkpoint that this rank made before leaving, `ended` which ranks it ended because they hung. The
    `exit_code` is that of the rank that failed, so that every node ends with it; KILLED if none could say why.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str,
        saved: str = "",
        ended: tuple[int, ...] = (),
        exit_code: ExitCode = ExitCode.KILLED,
    ) -> None:
        super().__init__(message, fix=fix)
        self.exit_code = exit_code
        self.saved = saved
        self.ended = ended


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank says of itself once the group is broken.

    `whole`: its state is that of the last step boundary. `failure` is its own, in a line, with its exit `code`; without
    one it has only noticed that of another. `suspect`: that was a fault of the accelerator after which the plugins want nothing
    saved.
    """

    whole: bool = False
    failure: str = ""
    code: int = ExitCode.FAILED
    suspect: bool = False


class StatusBoard:
    """Where ranks leave word for each other without the group. Every call is over after a few seconds, whatever happened."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def apart(self) -> StatusBoard:
        """The same board over a connection of its own: a thread that waits on the first one does not hold up this."""
        return StatusBoard(self._store.clone(), self._rank)  # type: ignore[attr-defined]

    def post(self, answer: Answer) -> None:
        """Leave word; the first one counts. Nobody will see it if the machine that has the board is gone."""
        _in_time(lambda: self._store.compare_set(str(self._rank), "", json.dumps(asdict(answer))))
        self.alarm()

    def alarm(self) -> None:
        """Let all ranks know that one is lost."""
        _in_time(lambda: self._store.set(_ALARM, "1"))

    def alarmed(self) -> bool | None:
        """Whether any rank has said that one is lost; None if the board is gone."""
        return _in_time(lambda: self._store.check([_ALARM]))

    def read(self, size: int) -> dict[int, Answer]:
        """The answers that are there, of `size` ranks; none if the board is gone."""

        def look() -> dict[int, Answer]:
            there = [rank for rank in range(size) if self._store.check([str(rank)])]
            return {rank: Answer(**json.loads(self._store.get(str(rank)))) for rank in there}

        return _in_time(look) or {}


def _in_time(action: Callable[[], T]) -> T | None:
    """What `action` gives; None if the other end of the line does not answer, which can take a call to a store very long."""
    found: list[T] = []

    def attempt() -> None:
        with suppress(dist.DistError):
            found.append(action())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_BOARD_SECONDS)
    return found[0] if found else None


class Claim:
    """In one process, among its threads: which of them acts on the loss of a rank, and that the state stays as it is then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._loss = ""

    @property
    def taken(self) -> bool:
        return self._owner is not None

    @property
    def loss(self) -> str:
        """What `freeze` was told; "" before."""
        return self._loss

    def take(self) -> bool:
        """Whether this thread is the one that calls the roll, saves and leaves: the first that asks is, from then on."""
        with self._lock:
            self._owner = self._owner or threading.get_ident()
            return self._owner == threading.get_ident()

    def freeze(self, loss: str) -> None:
        """A rank is lost: no further change of weights, moments and averages may begin."""
        with self._lock:
            self._loss = loss

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what says that they are about to change. Raises BrokenGroupError when they must not any more."""
        with self._lock:
            if self._loss:
                raise BrokenGroupError(self._loss)
            yield


@dataclass(frozen=True, kw_only=True)
class RankStatuses:
    """Who is still there once the group is broken, as one rank sees it.

    `gone` are processes that have ended without reporting why, `stopped` those that the system holds still, `silent` all others
    that did not answer, with what their process does, as far as that can be seen from this machine.
    """

    answers: Mapping[int, Answer]
    gone: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    silent: Mapping[int, str] = field(default_factory=dict)

    @property
    def saver(self) -> int | None:
        """The rank that is to save the state, if each rank has the whole of it; None if there is none that can.

        One that has failed does so only where all have: the others cannot know what it is still able to do.
        """
        failed = not (self.gone or self.hanging) and len(self.failures) == len(self.answers)
        able = (rank for rank, answer in self.answers.items() if answer.whole and (failed or not answer.failure))
        return min(able, default=None)

    @property
    def failures(self) -> dict[int, str]:
        return {rank: answer.failure for rank, answer in self.answers.items() if answer.failure}

    @property
    def hanging(self) -> tuple[int, ...]:
        """Those to whom it comes down that the group is broken, though their processes are there."""
        return self.stopped if self.gone or self.failures else (*self.stopped, *self.silent)

    @property
    def suspect(self) -> bool:
        return any(answer.suspect for answer in self.answers.values())


@dataclass(frozen=True, kw_only=True)
class FailureDetector:
    """The process of each rank, in rank order, as `rank` knows them. `board` is None where there is only one."""

    processes: tuple[Process, ...]
    rank: int = 0
    board: StatusBoard | None = None
    timeout: float = _TIMEOUT
    claim: Claim = field(default_factory=Claim)

    @classmethod
    def meet(cls, ranks: Communicator) -> FailureDetector:
        """*Collective*."""
        told = ranks.all_gather_text(json.dumps(asdict(Process.current())))
        board = None
        if dist.is_initialized() and dist.group.WORLD is not None:
            board = StatusBoard(PrefixStore("smalti/roll", dist.group.WORLD.get_group_store()), ranks.world.rank)
        return cls(processes=tuple(Process(**json.loads(text)) for text in told), rank=ranks.world.rank, board=board)

    def diagnose(self, error: BaseException, *, whole: bool = False, suspect: bool = False) -> RankStatuses | None:
        """Answer for this rank, on which `error` was raised, and hear the others; None if the error is this rank's own.

        Each rank calls it once, when it finds that it cannot go on. Takes some seconds if others do not answer. All groups
        of this process are broken after it. Of two threads of a process, the second one waits here for its end.
        """
        if self.board is None:
            return None
        if not self.claim.take():
            threading.Event().wait()
        if not (is_connection_error(error) or (isinstance(error, RuntimeError) and (self.claim.loss or self.gone()))):
            self.board.post(Answer(whole=whole, failure=in_a_line(error), code=exit_code_of(error), suspect=suspect))
            return None
        mine = Answer(whole=whole)
        self.board.post(mine)
        break_all_connections()
        deadline = time.monotonic() + self.timeout
        while True:
            statuses = self._roll({**self.board.read(len(self.processes)), self.rank: mine})
            if not statuses.silent or time.monotonic() > deadline:
                return statuses
            time.sleep(_GLANCE)

    def saves_after_all_failed(self) -> bool:
        """Whether every rank has failed by itself, as this one has, and it falls to this one to save.

        Waits for the answers of the others until one of them is in good order, or gone, or does not answer in time.
        """
        if self.board is None:
            return True
        break_all_connections()  # who is in good order finds out at once
        deadline = time.monotonic() + self.timeout
        while True:
            answers = self.board.read(len(self.processes))
            statuses = RankStatuses(answers=answers)
            if len(answers) == len(self.processes):
                return statuses.saver == self.rank and len(statuses.failures) == len(answers)
            if len(statuses.failures) < len(answers) or self.gone() or time.monotonic() > deadline:
                return False
            time.sleep(_GLANCE)

    def notice(self, error: BaseException) -> LostRankError | None:
        """What an exception comes from, if it is the loss of another rank; None if it is this rank's own. Calls the roll."""
        statuses = self.diagnose(error)
        return self.explain(statuses, error, ended=self.end_hanging(statuses)) if statuses is not None else None

    def explain(
        self, statuses: RankStatuses, error: BaseException, *, unsaved: str = "", saved: str = "", ended: tuple[int, ...] = ()
    ) -> LostRankError:
        """What a roll call has shown, in words, for whoever cannot go on because of it; `unsaved` is added to them."""
        causes = [f"{self._name(rank)} is gone" for rank in statuses.gone]
        causes += [f"{self._name(rank)} did not answer: it is stopped" for rank in statuses.stopped]
        causes += [f"{self._name(rank)} failed ({failure})" for rank, failure in statuses.failures.items()]
        if not causes:
            causes = [
                f"{self._name(rank)} did not answer within {self.timeout:g} s{f' (it is {doing})' if doing else ''}"
                for rank, doing in statuses.silent.items()
            ]
        who = "; ".join(causes) or "every rank is there, but the connections between them broke"
        if statuses.gone or statuses.failures:
            fix = "the first rank that failed tells why; a killed one cannot: dmesg tells whether memory ran out"
        else:
            fix = "check that node, and what its process waited for: storage, network, a debugger or a stop signal"
        noticed = f"it noticed by {in_a_line(error)}{_where(error)}"
        told = [f"{who}, so this rank cannot go on", noticed, *([unsaved] if unsaved else [])]
        code = statuses.answers[min(statuses.failures)].code if statuses.failures else ExitCode.KILLED
        return LostRankError("; ".join(told), fix=fix, saved=saved, ended=ended, exit_code=ExitCode(code))

    def end_hanging(self, statuses: RankStatuses) -> tuple[int, ...]:
        """Kill the hanging ranks of this machine; they can neither save nor leave, and may hold what others need for that.

        The lowest rank here that has answered does it, and waits for their end; returns whom it killed.
        """
        here = [rank for rank in range(len(self.processes)) if self.processes[rank].alive() is not None]
        if self.rank != min(rank for rank in here if rank in statuses.answers):
            return ()
        ended = tuple(rank for rank in statuses.hanging if self.processes[rank].alive())
        for rank in ended:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        deadline = time.monotonic() + self.timeout
        while any(self.processes[rank].alive() for rank in ended) and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        return ended

    def _roll(self, answers: Mapping[int, Answer]) -> RankStatuses:
        missing = [rank for rank in range(len(self.processes)) if rank not in answers]
        gone = self.gone()
        doing = {rank: self.processes[rank].status() for rank in missing if rank not in gone}
        return RankStatuses(
            answers=answers,
            gone=tuple(rank for rank in missing if rank in gone),
            stopped=tuple(rank for rank, status in doing.items() if status in ("stopped", "tracing-stop")),
            silent={rank: status for rank, status in doing.items() if status not in ("stopped", "tracing-stop")},
        )

    def gone(self) -> list[int]:
        """Ranks whose processes have ended. Whether one still runs can be seen on this machine only."""
        return [rank for rank, process in enumerate(self.processes) if process.alive() is False]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.processes[rank]})"


def write_lost_report(lost: LostRankError) -> None:
    """The last word of a rank that only the loss of another one has ended."""
    write_exit_report(lost.exit_code, describe(lost), secondary=True, saved=lost.saved, killed_ranks=lost.ended)


def in_a_line(error: BaseException) -> str:
    """Kind and first line; of what gloo says, neither the place in its source nor its advice."""
    told = str(error).partition("\n")[0]
    if is_connection_error(error):
        told = _SOURCE.sub("", told).partition(". ")[0]
    return f"{type(error).__name__}: {told}"


def _where(error: BaseException) -> str:
    """In which hook of which plugin, if it was raised in one."""
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if not note.startswith("fix: "))
