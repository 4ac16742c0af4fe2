"""Asynchronous saves: one checkpoint at a time, written by a background thread.

begin              takes the state at a step boundary; the thread copies it to host memory while the next step computes
wait_for_staging   to be called before any of that state changes: waits until it was copied
poll               the result of the save, at a later step boundary and on all ranks at once
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


class _SaveStatus(IntEnum):
    """Status of a save on one rank; the largest over all ranks counts."""

    SAVED = 0
    FAILED = 1
    BROKEN = 2
    RUNNING = 3


@dataclass(kw_only=True)
class _PendingSave:
    """A save that has begun. `blocked`: seconds that training has waited for it.

    `connection_error` is what broke the connection to the other ranks; `local_error` a failure of this rank alone, after which
    it closed the connection.
    """

    step: int
    connection_error: RuntimeError | None = None
    local_error: BaseException | None = None
    staged: Event = field(default_factory=Event)
    result: Future[Checkpoint] = field(init=False)
    blocked: float = 0.0

    def status(self) -> _SaveStatus:
        if not self.result.done():
            return _SaveStatus.RUNNING
        error = self.result.exception()
        if error is None:
            return _SaveStatus.SAVED
        return _SaveStatus.FAILED if isinstance(error, SaveError) else _SaveStatus.BROKEN


class Saver:
    """Writes checkpoints with `write`, in a thread that communicates with the other ranks' threads through `background`.

    `communicator` is that of the training loop. Call all methods from the loop's thread.
    """

    def __init__(self, *, write: Write, communicator: Communicator, background: AbortableCommunicator) -> None:
        self._write = write
        self._communicator = communicator
        self._background = background
        self._staging = Staging(communicator.world.device)
        device = communicator.world.device
        self._thread = ThreadPoolExecutor(1, "smalti-save", initializer=use_device, initargs=(device,))
        self._pending: _PendingSave | None = None

    def begin(self, snapshot: Snapshot, *, changing: Collection[str] = (), blocking: bool = False) -> None:
        """Start to write a snapshot of live tensors; the previous save must have ended.

        `changing` names tensors of the model that may change before `wait_for_staging` (buffers do, in a forward pass). With
        `blocking` this waits until everything is written, and makes no copy.
        """
        assert self._pending is None, "one save at a time"
        started = time.perf_counter()
        pending = _PendingSave(step=snapshot.step)
        source = snapshot if blocking else frozen(snapshot, changing)
        self._staging.wait_for_current_stream()
        pending.result = self._thread.submit(self._save, pending, source, not blocking)
        self._pending = pending
        if blocking:
            wait([pending.result])
        pending.blocked = time.perf_counter() - started

    def wait_for_staging(self) -> None:
        """Wait until the state that `begin` was given may change.

        Raises the error that broke the connection to the other ranks, if there was one; then nothing has changed since the step
        boundary.
        """
        pending = self._pending
        if pending is None:
            return
        if not pending.staged.is_set():
            started = time.perf_counter()
            pending.staged.wait()
            pending.blocked += time.perf_counter() - started
        if pending.connection_error is not None:
            raise pending.connection_error

    def poll(self, *, finish: bool = False) -> Checkpoint | SaveError | None:
        """The result of the pending save, the same on every rank; None if there is none, or some rank is still working on it.

        *Collective*. With `finish` this waits for the save to end. Raises, on every rank, a failure that neither the system nor
        the user caused; raises an error of the connection to the other ranks at once, without communicating.
        """
        pending = self._pending
        if pending is None:
            return None
        if finish:
            wait([pending.result])
        if pending.connection_error is not None:
            raise pending.connection_error
        try:
            status = self._communicator.all_reduce_max(pending.status())
        except RuntimeError:
            if pending.local_error is not None:  # which made the others leave
                raise pending.local_error from None
            raise
        if status == _SaveStatus.RUNNING:
            return None
        self._pending = None
        error = pending.result.exception()
        if error is None and status == _SaveStatus.SAVED:
            return replace(pending.result.result(), blocked=pending.blocked)
        failure = error or SaveError(f"cannot save step {pending.step}: another rank failed while finishing it")
        if status == _SaveStatus.BROKEN or not isinstance(failure, SaveError):
            raise failure
        return failure

    @property
    def local_error(self) -> BaseException | None:
        """The failure of this rank alone in the pending save; the other ranks find the connection broken."""
        return self._pending.local_error if self._pending is not None else None

    @property
    def is_pending(self) -> bool:
        """Whether a save has begun whose result was not polled yet."""
        return self._pending is not None

    @property
    def pending_step(self) -> int | None:
        """The step of the save that has begun and was not reported by `poll`; None if there is none."""
        return self._pending.step if self._pending is not None else None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the pending save has ended, with any result; returns False if it has not within this time."""
        return self._pending is None or not wait([self._pending.result], timeout=seconds).not_done

    def close(self) -> None:
        """Wait for the pending save to end, with any result."""
        self._thread.shutdown(wait=True)

    def _save(self, pending: _PendingSave, snapshot: Snapshot, stage: bool) -> Checkpoint:
        try:
            if stage:
                snapshot = self._staging.copy(snapshot, self._background)
            pending.staged.set()
            return self._write(snapshot, self._background)
        except RankError as failure:
            message = f"cannot save step {pending.step}: {failure}"
            raise SaveError(message, fix=failure.fix, errno=failure.errno) from failure
        except SaveError:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_connection_error(error):
                pending.connection_error = error
            else:
                pending.local_error = error
                self._background.abort()  # the others may wait for this rank
            raise
        finally:
            pending.staged.set()
