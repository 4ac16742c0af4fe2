"""A request to stop that waits for ranks which make no progress, and the end of a single process that hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

from smalti import Config, RunState, StopReason
from smalti.rundir import RunDirectory
from smalti.system import load_json, preemption_signals, read_regular


def asked_since(directory: RunDirectory, state: RunState) -> float | None:
    """How many seconds ago this run was asked to stop, by a signal or a command; None if it was not.

    A run that has made all its steps was not: what it does at its end, such as an upload, may take its time.
    """
    asked = state.stop_requested_at if state.stop_reason is not StopReason.COMPLETED else None
    ages = [] if asked is None else [time.monotonic() - asked]
    for path in directory.control.glob("*.json"):
        with suppress(OSError, ValueError, AttributeError):  # just taken, or no request: the loop says so
            if load_json(read_regular(path)).get("kind") == "stop":
                ages.append(max(0.0, time.time() - path.stat().st_mtime))
    return max(ages, default=None)


def grace_of(config: Config) -> float | None:
    """The seconds from a signal until the process is killed, if a package has that option and it is given."""
    value = config.value("grace_seconds") if "grace_seconds" in config.schema.options else None
    return float(value) if isinstance(value, int | float) else None


INTERRUPT = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else None
"""Not one that a scheduler, torch or a debugger sends. macOS has no real-time signals: there nothing is interrupted."""


class HangError(RuntimeError):
    """Raised in the main thread of a single process that hangs and is asked to stop."""


def _raise(number: int, frame: object) -> NoReturn:
    raise HangError("it did not return, and the run was asked to stop")


class Interruption:
    """Notes signals to stop, also while the main thread is in a library where no handler of Python runs, and interrupts it.

    To open and close in the main thread; elsewhere nothing is noted or interrupted.
    """

    def __init__(self) -> None:
        self._noted: float | None = None
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for each in self._pipe:
            os.set_blocking(each, False)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if INTERRUPT is not None:
            signal.signal(INTERRUPT, _raise)

    def close(self) -> None:
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._before)
        for each in self._pipe:
            os.close(each)
        self._pipe = None
        if INTERRUPT is not None:
            signal.signal(INTERRUPT, signal.SIG_IGN)

    def asked_since(self) -> float | None:
        """How many seconds ago a signal to stop was noticed here; None if none came."""
        with suppress(BlockingIOError):
            came = os.read(self._pipe[0], 4096) if self._pipe is not None else b""
            if self._noted is None and set(came) & {signal.SIGINT, *preemption_signals()}:
                self._noted = time.monotonic()
        return None if self._noted is None else time.monotonic() - self._noted

    def interrupt(self) -> None:
        """Let the main thread leave what it waits for with a `HangError`, unless it waits in a library that minds no signal."""
        if INTERRUPT is not None and self._pipe is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
