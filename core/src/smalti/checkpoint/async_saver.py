"""Saving beside training: one checkpoint at a time, in a thread of its own.

begin      the state at a step boundary; the thread copies it to host memory while the next step computes
release    before anything of that state changes: waits until it was copied
landed     what became of it, told at a later step boundary on all ranks at once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from enum import IntEnum
from threading import Event

from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.staging import Staging, frozen
from smalti.checkpoint.writer import SaveError
from smalti.parallel import AbortableCommunicator, Communicator, RankError, is_connection_error, use_device
from smalti.types import Checkpoint

Write = Callable[[Snapshot, Communicator], Checkpoint]


class _Standing(IntEnum):
    """How a save stands on a rank; the largest over ranks counts."""

    SAVED = 0
    FAILED = 1
    BROKEN = 2
    RUNNING = 3


@dataclass(kw_only=True)
class _Flight:
    """A save that has begun. `blocked` is how long training has waited for it, in seconds.

    `cut_off` is what broke the line to the other ranks, `defect` a failure of this rank alone, for which it broke the line.
    """

    step: int
    cut_off: RuntimeError | None = None
    defect: BaseException | None = None
    released: Event = field(default_factory=Event)
    result: Future[Checkpoint] = field(init=False)
    blocked: float = 0.0

    def standing(self) -> _Standing:
        if not self.result.done():
            return _Standing.RUNNING
        error = self.result.exception()
        if error is None:
            return _Standing.SAVED
        return _Standing.FAILED if isinstance(error, SaveError) else _Standing.BROKEN


class Saver:
    """Writes checkpoints with `write`, in a thread that speaks to the other ranks' threads through `side`.

    The loop's own words go through `ranks`. All methods belong to the loop's thread.
    """

    def __init__(self, *, write: Write, ranks: Communicator, side: AbortableCommunicator) -> None:
        self._write = write
        self._ranks = ranks
        self._side = side
        self._staging = Staging(ranks.world.device)
        device = ranks.world.device
        self._thread = ThreadPoolExecutor(1, "smalti-save", initializer=use_device, initargs=(device,))
        self._flight: _Flight | None = None

    def begin(self, snapshot: Snapshot, *, changing: Collection[str] = (), at_once: bool = False) -> None:
        """Start to write a snapshot of live tensors; the save before must have landed.

        `changing` names tensors of the model that may change before `release` (buffers do, in a forward pass). With `at_once`
        this waits until all is written, and spares the copy.
        """
        assert self._flight is None, "one save at a time"
        started = time.perf_counter()
        flight = _Flight(step=snapshot.step)
        steady = snapshot if at_once else frozen(snapshot, changing)
        self._staging.follow()
        flight.result = self._thread.submit(self._save, flight, steady, not at_once)
        self._flight = flight
        if at_once:
            wait([flight.result])
        flight.blocked = time.perf_counter() - started

    def release(self) -> None:
        """Wait until the state that `begin` was given may change.

        Raises what broke the line to the other ranks, if that happened meanwhile; nothing has changed then since the boundary.
        """
        flight = self._flight
        if flight is None:
            return
        if not flight.released.is_set():
            started = time.perf_counter()
            flight.released.wait()
            flight.blocked += time.perf_counter() - started
        if flight.cut_off is not None:
            raise flight.cut_off

    def landed(self, *, finish: bool = False) -> Checkpoint | SaveError | None:
        """What became of the save in flight, the same on every rank; None if there is none, or some rank still works on it.

        *Collective*. With `finish` this waits for it. A failure that is neither the system's nor the user's is raised, on every
        rank; what broke the line to the other ranks at once, without asking them.
        """
        flight = self._flight
        if flight is None:
            return None
        if finish:
            wait([flight.result])
        if flight.cut_off is not None:
            raise flight.cut_off
        try:
            standing = self._ranks.all_reduce_max(flight.standing())
        except RuntimeError:
            if flight.defect is not None:  # which made the others leave
                raise flight.defect from None
            raise
        if standing == _Standing.RUNNING:
            return None
        self._flight = None
        error = flight.result.exception()
        if error is None and standing == _Standing.SAVED:
            return replace(flight.result.result(), blocked=flight.blocked)
        told = error or SaveError(f"cannot save step {flight.step}: another rank failed at its end")
        if standing == _Standing.BROKEN or not isinstance(told, SaveError):
            raise told
        return told

    @property
    def defect(self) -> BaseException | None:
        """What failed on this rank alone as it wrote the save in flight; the others find the line broken."""
        return self._flight.defect if self._flight is not None else None

    def wait(self, seconds: float | None = None) -> bool:
        """Until the save in flight has come to its end, if there is one, whatever it is; whether it did in this time."""
        return self._flight is None or not wait([self._flight.result], timeout=seconds).not_done

    def close(self) -> None:
        """Let a save in flight come to its end, whatever it is."""
        self._thread.shutdown(wait=True)

    def _save(self, flight: _Flight, snapshot: Snapshot, stage: bool) -> Checkpoint:
        try:
            if stage:
                snapshot = self._staging.copy(snapshot, self._side)
            flight.released.set()
            return self._write(snapshot, self._side)
        except RankError as failure:
            message = f"cannot save step {flight.step}: {failure}"
            raise SaveError(message, fix=failure.fix, errno=failure.errno) from failure
        except SaveError:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_connection_error(error):
                flight.cut_off = error
            else:
                flight.defect = error
                self._side.abort()  # the others may wait for this rank
            raise
        finally:
            flight.released.set()
