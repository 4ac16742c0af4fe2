"""When a rank fails, hangs or is lost: how the remaining ranks find out which one, and which of them saves.

Each rank that detects a failure posts its status to a store beside the process group (that of the rendezvous), breaks its own
connections, so that no rank waits for it, and reads the statuses of the others. Nothing of this runs before a failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from smalti.errors import ExitCode, UserError
from smalti.parallel.gloo import BrokenGroupError, break_all_connections, is_connection_error
from smalti.parallel.protocol import Communicator
from smalti.system import Process, describe, exit_code_of, name_ranks, read_lost_peers, write_exit_report

if TYPE_CHECKING:
    from smalti.parallel.rank_boards import RankStatus, StatusBoard

_TIMEOUT = 10.0
"""Seconds within which a healthy rank posts its status; it may have to finish a long computation first."""
_POLL_SECONDS = 0.05
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class LostRankError(UserError):
    """Another rank is gone, hangs or has failed, so this one cannot continue.

    `saved` describes the checkpoint that this rank has saved, `ended` are the hanging ranks that it killed. `exit_code` is that
    of the rank that failed, so that every node exits with it; KILLED if no rank could report why.
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


class Claim:
    """Among the threads of a process: which one handles the loss of a rank; and a lock on the state from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.loss = ""
        """What was passed to `freeze`; "" before."""

    @property
    def taken(self) -> bool:
        return self._owner is not None

    def take(self) -> bool:
        """Whether this thread is the one that diagnoses, saves and exits: the first that calls this, from then on."""
        with self._lock:
            self._owner = self._owner or threading.get_ident()
            return self._owner == threading.get_ident()

    def freeze(self, loss: str) -> None:
        """A rank is lost: from now on weights, optimizer state and EMA must not be changed."""
        with self._lock:
            self.loss = loss

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around the start of such a change. Raises BrokenGroupError after `freeze`."""
        with self._lock:
            if self.loss:
                raise BrokenGroupError(self.loss)
            yield


@dataclass(frozen=True, kw_only=True)
class RankStatuses:
    """The status of every rank once the process group is broken, as one rank sees it.

    `posted` are the statuses that ranks have posted. Of the other ranks, `gone` have ended without a report, `stopped` are
    stopped by a signal or a debugger, and `silent` are the rest, with the state of their process if it runs on this node.
    """

    posted: Mapping[int, RankStatus]
    gone: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    silent: Mapping[int, str] = field(default_factory=dict)

    @property
    def saver(self) -> int | None:
        """The rank that saves the state, if each rank holds the whole of it; None if no rank can.

        A rank that has failed saves only if all have failed: the others cannot know what it is still able to do.
        """
        failed = not (self.gone or self.hanging) and len(self.failures) == len(self.posted)
        able = (rank for rank, status in self.posted.items() if status.state_consistent and (failed or not status.failure))
        return min(able, default=None)

    @property
    def failures(self) -> dict[int, str]:
        return {rank: status.failure for rank, status in self.posted.items() if status.failure}

    @property
    def hanging(self) -> tuple[int, ...]:
        """Ranks whose processes exist, and which are the reason why the group is broken."""
        return self.stopped if self.gone or self.failures else (*self.stopped, *self.silent)

    @property
    def suspect(self) -> bool:
        return any(status.suspect for status in self.posted.values())


@dataclass(frozen=True, kw_only=True)
class FailureDetector:
    """Of the rank `rank`. `processes` are those of all ranks, in rank order, `local_size` of them on each node.

    `board` is None for a single process.
    """

    processes: tuple[Process, ...]
    local_size: int = 1
    rank: int = 0
    board: StatusBoard | None = None
    timeout: float = _TIMEOUT
    claim: Claim = field(default_factory=Claim)

    @classmethod
    def create(cls, communicator: Communicator) -> FailureDetector:
        """Every rank learns the processes of all. *Collective*."""
        processes = communicator.all_gather_text(json.dumps(asdict(Process.current())))
        board = None
        if dist.is_initialized() and dist.group.WORLD is not None:
            from smalti.parallel.rank_boards import StatusBoard

            board = StatusBoard(dist.group.WORLD.get_group_store(), communicator.world.rank)
        return cls(
            processes=tuple(Process(**json.loads(text)) for text in processes),
            local_size=communicator.world.local_size,
            rank=communicator.world.rank,
            board=board,
        )

    def diagnose(self, error: BaseException, *, state_consistent: bool = False, suspect: bool = False) -> RankStatuses | None:
        """Post the status of this rank, on which `error` was raised; returns those of all ranks. None if the error is its own.

        Each rank calls it once, when it cannot continue. Takes seconds if a rank does not respond. Afterwards all groups
        of this process are broken. If a second thread calls it, that thread blocks until the process ends.
        """
        if self.board is None:
            return None
        from smalti.parallel.rank_boards import RankStatus

        if not self.claim.take():
            threading.Event().wait()
        if not (is_connection_error(error) or (isinstance(error, RuntimeError) and (self.claim.loss or self.gone()))):
            failure = RankStatus(
                state_consistent=state_consistent, failure=in_a_line(error), code=exit_code_of(error), suspect=suspect
            )
            self.board.post(failure)
            return None
        mine = RankStatus(state_consistent=state_consistent)
        self.board.post(mine)
        break_all_connections()
        deadline = time.monotonic() + self.timeout
        while True:
            statuses = self._statuses({**self.board.posted(len(self.processes)), self.rank: mine})
            if not statuses.silent or self.board.lost or time.monotonic() > deadline:
                return statuses
            time.sleep(_POLL_SECONDS)

    def saves_after_all_failed(self) -> bool:
        """Whether every rank has failed by itself, as this one has, and this one is the one that saves.

        Waits for the statuses of the others until one of them has not failed, is gone, or does not respond in time.
        """
        if self.board is None:
            return True
        break_all_connections()  # ranks that have not failed detect it at once
        deadline = time.monotonic() + self.timeout
        while True:
            posted = self.board.posted(len(self.processes))
            statuses = RankStatuses(posted=posted)
            if len(posted) == len(self.processes):
                return statuses.saver == self.rank and len(statuses.failures) == len(posted)
            if len(statuses.failures) < len(posted) or self.gone() or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def lost_rank(self, error: BaseException) -> LostRankError | None:
        """The loss of another rank that caused this exception, after `diagnose`; None if the error is this rank's own."""
        statuses = self.diagnose(error)
        return self.explain(statuses, error, ended=self.end_hanging(statuses)) if statuses is not None else None

    def explain(
        self, statuses: RankStatuses, error: BaseException, *, unsaved: str = "", saved: str = "", ended: tuple[int, ...] = ()
    ) -> LostRankError:
        """The error for a rank that cannot continue because of these statuses; `unsaved` says why it has not saved."""
        causes = self._causes(statuses.gone)
        causes += [f"{self._name(rank)} did not answer: it is stopped" for rank in statuses.stopped]
        causes += [f"{self._name(rank)} failed ({failure})" for rank, failure in statuses.failures.items()]
        if not causes:
            causes = [
                f"{self._name(rank)} did not answer within {self.timeout:g} s{f' (it is {doing})' if doing else ''}"
                for rank, doing in statuses.silent.items()
            ]
        who = "; ".join(causes) or "all ranks respond, but the connections between them broke"
        peers = read_lost_peers()
        if not statuses.failures and any(self._node(rank) in peers.nodes for rank in statuses.gone):
            fix = peers.fix
        elif statuses.gone or statuses.failures:
            fix = "the first rank that failed tells why; a killed one cannot: dmesg tells whether memory ran out"
        else:
            fix = "check that node, and what its process waited for: storage, network, a debugger or a stop signal"
        noticed = f"detected by {in_a_line(error)}{_where(error)}"
        parts = [f"{who}, so this rank cannot continue", noticed, *([unsaved] if unsaved else [])]
        code = statuses.posted[min(statuses.failures)].code if statuses.failures else ExitCode.KILLED
        return LostRankError("; ".join(parts), fix=fix, saved=saved, ended=ended, exit_code=ExitCode(code))

    def end_hanging(self, statuses: RankStatuses) -> tuple[int, ...]:
        """Kill the hanging ranks of this node: they can neither save nor exit, and may hold resources that others need.

        The lowest rank here that has posted a status does it, and waits for their end. Returns the ranks that it killed.
        """
        here = [rank for rank in range(len(self.processes)) if self.processes[rank].alive() is not None]
        if self.rank != min(rank for rank in here if rank in statuses.posted):
            return ()
        ended = tuple(rank for rank in statuses.hanging if self.processes[rank].alive())
        for rank in ended:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        deadline = time.monotonic() + self.timeout
        while any(self.processes[rank].alive() for rank in ended) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return ended

    def _statuses(self, posted: Mapping[int, RankStatus]) -> RankStatuses:
        missing = [rank for rank in range(len(self.processes)) if rank not in posted]
        gone = self.gone()
        doing = {rank: self.processes[rank].status() for rank in missing if rank not in gone}
        return RankStatuses(
            posted=posted,
            gone=tuple(rank for rank in missing if rank in gone),
            stopped=tuple(rank for rank, status in doing.items() if status in ("stopped", "tracing-stop")),
            silent={rank: status for rank, status in doing.items() if status not in ("stopped", "tracing-stop")},
        )

    def gone(self) -> list[int]:
        """Ranks whose processes have ended, as far as they ran on this node or its agent knows; and those of lost nodes."""
        lost = read_lost_peers()
        return [
            rank
            for rank, process in enumerate(self.processes)
            if process.alive() is False or rank in lost.ranks or self._node(rank) in lost.nodes
        ]

    def _causes(self, gone: Sequence[int]) -> list[str]:
        """How ranks that are gone were lost: nodes first, as a whole."""
        lost = read_lost_peers()
        whole = {node: [rank for rank in gone if self._node(rank) == node] for node in lost.nodes}
        causes = [f"{lost.nodes[node]} ({name_ranks(ranks)})" for node, ranks in whole.items() if ranks]
        single = [rank for rank in gone if self._node(rank) not in lost.nodes]
        return [*causes, *(f"{self._name(rank)} {lost.ranks.get(rank, 'is gone')}" for rank in single)]

    def _node(self, rank: int) -> int:
        return rank // self.local_size

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.processes[rank]})"


def write_lost_report(lost: LostRankError) -> None:
    """The exit report of a rank that ends only because another one was lost."""
    write_exit_report(lost.exit_code, describe(lost), secondary=True, saved=lost.saved, killed_ranks=lost.ended)


def in_a_line(error: BaseException) -> str:
    """Type and first line; of gloo's messages without the place in its source and without its advice."""
    text = str(error).partition("\n")[0]
    if is_connection_error(error):
        text = _SOURCE.sub("", text).partition(". ")[0]
    return f"{type(error).__name__}: {text}"


def _where(error: BaseException) -> str:
    """The hook and plugin in which it was raised, if any."""
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if not note.startswith("fix: "))
