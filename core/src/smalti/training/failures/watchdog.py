"""A thread beside the loop that learns of a lost rank where the loop cannot: while it waits in a call that never comes back.

An accelerator waits for other ranks in its own kernels, and who waits for the accelerator is in C++, where neither signals
nor exceptions arrive. So this thread looks once a second whether another rank has said that one is lost, and whether the
processes of this machine are there. If one is lost and the main thread does not notice by itself, its connections to other
ranks are broken, NCCL's too, which should let it come back. If it does not, this thread does what the main thread would have
done: it diagnoses the ranks, saves if this rank is the one that saves, reports, and ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from smalti.errors import ExitCode
from smalti.hookspecs import HookSpecs
from smalti.parallel import BrokenGroupError, FailureDetector, break_group, write_lost_report
from smalti.plugins import notify_each
from smalti.system import describe, exit_within, flush_standard_streams, read_lost_peers, write_exit_report
from smalti.training.failures.emergency_save import emergency_save
from smalti.training.run import Run

LEAVE_SECONDS = 60.0
"""A rank that has to leave because of a failure does so in this time, counted from the last progress of a save."""
_FAREWELL_SECONDS = 10.0


def leave(error: BaseException, code: ExitCode, run: Run | None, save: Callable[[], BaseException]) -> NoReturn:
    """End the process with this code, because of `error`. `save` saves what it can, and returns the error to tell observers."""
    exit_within(LEAVE_SECONDS, code)
    try:
        last = save()
        if run is not None:
            _tell_observers(run, last)
    except BaseException as failure:  # noqa: BLE001 - the top of all that is left of this process
        write_exit_report(code, f"{describe(error)}; then {describe(failure)}")
        traceback.print_exc()
    flush_standard_streams()
    os._exit(code)


def _tell_observers(run: Run, error: BaseException) -> None:
    """Call the last hooks, for as long as they may take; one of them can be what the main thread waits for."""

    def tell() -> None:
        notify_each(run.plugins, HookSpecs.on_error, run.state, error=error)
        notify_each(run.plugins, HookSpecs.on_train_end, run.state, outcome=None)
        notify_each(run.plugins, HookSpecs.on_rank_end, run.state, error=error)
        if run.info.writer is not None:
            run.info.writer.close()

    telling = threading.Thread(target=tell, name="smalti-farewell", daemon=True)
    telling.start()
    telling.join(_FAREWELL_SECONDS)


_EVERY_SECONDS = 1.0
_UNAIDED_SECONDS = 2.0
"""In which a main thread that waits for gloo, or for nothing, has noticed by itself."""
_RETURN_SECONDS = 5.0
"""In which one comes back whose connections are broken. With the two above less than the others wait for its answer."""
_UPDATE_SECONDS = 20.0
"""The same while it changes weights, which should come to its end."""


class Watch:
    """A thread beside the loop, to use in a `with` statement. `run` is to be set once there is one: what can be saved.

    `_watched` is the thread of that statement. `_apart` is its detector with a connection of its own.
    """

    name: str

    def __init__(self, detector: FailureDetector) -> None:
        self.run: Run | None = None
        self._detector = detector
        self._over = threading.Event()
        self._watched = threading.get_ident()

    def __enter__(self) -> Self:
        board = self._detector.board
        self._apart = self._detector if board is None else replace(self._detector, board=board.clone())
        threading.Thread(target=self._watch, name=self.name, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()

    def _watch(self) -> None:
        raise NotImplementedError


class Watchdog(Watch):
    """Around all that a rank does together with others. Does nothing in a single process."""

    name = "smalti-watchdog"

    def _watch(self) -> None:
        if self._apart.board is None:
            return
        claim = self._detector.claim
        while not (loss := self._loss()):
            if self._over.wait(_EVERY_SECONDS):
                return
        self._apart.board.alarm()  # processes of this machine cannot be seen from others
        if self._comes_back(_UNAIDED_SECONDS):
            return
        claim.freeze(loss)  # before anything that makes collective calls end with wrong results
        break_group(_RETURN_SECONDS)
        if self.run is not None and self.run.boundary.final:
            return  # the loop ends by itself
        if not self._comes_back(_RETURN_SECONDS) and claim.take():
            self._leave()

    def _loss(self) -> str:
        """How another rank was lost, as far as it is known yet; "" if none is."""
        board = self._apart.board
        if lost := read_lost_peers().nodes:
            return next(iter(lost.values()))
        if gone := self._detector.gone():
            return f"rank {gone[0]} is gone"
        return "another rank is lost" if board is not None and board.alarmed() else ""

    def _comes_back(self, seconds: float) -> bool:
        """Whether the main thread notices in this time, or is through with all that ranks do together."""
        begun = time.monotonic()
        while not self._detector.claim.taken:
            changing = self.run is not None and not self.run.boundary.state_consistent
            if time.monotonic() - begun > (_UPDATE_SECONDS if changing else seconds):
                return False
            if self._over.wait(0.05):
                return True
        return True

    def _leave(self) -> NoReturn:
        """In place of the main thread, which stays where it is."""
        error = BrokenGroupError(f"the main thread does not come back from {self._place()}")

        def save() -> BaseException:
            lost = (
                self._apart.lost_rank(error) if self.run is None else emergency_save(self.run, error, self._apart, aside=True)
            )
            assert lost is not None, "it is not this rank's own failure"
            write_lost_report(lost)
            print(f"smalti: {lost}", file=sys.stderr)
            return lost

        leave(error, ExitCode.FAILED, self.run, save)

    def _place(self) -> str:
        """Where the main thread waits: the innermost function that is Python's."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return "its end"
        return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
