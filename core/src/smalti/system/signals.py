"""Signals that end a run, also outside the training loop: before the first step, after the last one, during encoding."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from smalti.errors import ExitCode

REPEAT_SECONDS = 10.0
"""A second SIGTERM within this time counts as a repetition: a scheduler, a supervisor and a process group may each send one."""
STOPPING = "finishing this step, then saving; press Ctrl-C again to end now"


@dataclass
class _SignalState:
    exits_after_command: bool = False
    run_ended: bool = False


_state = _SignalState()


class Stopped(KeyboardInterrupt):
    """A request stopped the run before its first step."""


class Terminated(KeyboardInterrupt):
    """A scheduler asked the process to end, or its terminal was closed.

    Like KeyboardInterrupt, it is not caught by `except Exception`.
    """


@contextmanager
def preemption_as_exception() -> Iterator[None]:
    """Within the block, `preemption_signals` raise `Terminated`, as Ctrl-C raises KeyboardInterrupt. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal_filter = SignalFilter()
    _state.run_ended = False

    def handle(number: int, frame: object) -> None:
        if signal_filter.accepts(number) and not _state.run_ended:
            raise Terminated

    with signal_handler(preemption_signals(), handle):
        yield


def interrupt_main_thread() -> None:
    """Raise `Terminated` in the main thread, from another thread. The main thread must be in `preemption_as_exception`."""
    signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)


def ignore_later_signals() -> None:
    """Ignore preemption signals once the result of the run is known, until `preemption_as_exception` is entered again."""
    _state.run_ended = True


def ignore_signals_after_command() -> None:
    """Ignore preemption signals after the command of this process, so that they cannot change its exit code."""
    _state.exits_after_command = True


def preemption_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM; SIGHUP, when the terminal is closed; SIGUSR1 and SIGUSR2, which schedulers send before the time limit.

    Signals that the process was started to ignore, as by `nohup`, are left out, except SIGTERM.
    """
    notices = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return (signal.SIGTERM, *(each for each in notices if signal.getsignal(each) is not signal.SIG_IGN))


class SignalFilter:
    """Separates requests from signals that only repeat an earlier request.

    The first signal requests a stop. A later one that is accepted requests the immediate end: Ctrl-C, as a person decided it,
    and SIGTERM if it comes more than `REPEAT_SECONDS` after the first SIGTERM. The others are notices and are never accepted
    again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._received_any = False
        self._first_sigterm: float | None = None

    def accepts(self, number: int) -> bool:
        """Whether the signal that has just arrived is a new request."""
        first, self._received_any = not self._received_any, True
        if number == signal.SIGTERM:
            if self._first_sigterm is None:
                self._first_sigterm = self._clock()
                return first
            return self._clock() - self._first_sigterm > REPEAT_SECONDS
        return first or number == signal.SIGINT


def immediate_exit_code(number: int) -> ExitCode:
    """The exit code of a run that a second signal ends before it has saved."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.KILLED


def print_from_handler(text: str) -> None:
    """Print a message to standard error from a signal handler, where `print` is not safe."""
    with suppress(OSError):  # closed by the reader
        os.write(2, f"smalti: {text}\n".encode())


@contextmanager
def signal_handler(signals: Iterable[signal.Signals], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Within the block, these signals call `handle`. In the main thread only."""
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL and _state.exits_after_command:
                handler = signal.SIG_IGN
            if handler is not None:  # None for a handler that was not installed from Python and cannot be restored
                signal.signal(number, handler)
