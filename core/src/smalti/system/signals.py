"""Signals that end a run, also where it cannot stop by itself: before its first step, after its last, during encoding."""

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
"""In which a second SIGTERM is the first one again: a scheduler, a supervisor and a process group may each send one."""
STOPPING = "finishing this step, then saving; press Ctrl-C again to end now"


@dataclass
class _SignalState:
    exits_after_command: bool = False
    run_ended: bool = False


_state = _SignalState()


class Stopped(KeyboardInterrupt):
    """Somebody asked the run to stop before its first step."""


class Terminated(KeyboardInterrupt):
    """A scheduler wants the process to end, or its terminal was closed.

    It unwinds like Ctrl-C, and like that no `except Exception` stops it.
    """


@contextmanager
def preemption_as_exception() -> Iterator[None]:
    """Within it, `preemption_signals` raise `Terminated`, as Ctrl-C raises KeyboardInterrupt; only in the main thread."""
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
    """Raise `Terminated` in the main thread, from any other one. Only while `preemption_as_exception` is in force there."""
    signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)


def ignore_later_signals() -> None:
    """The run has ended, and how is known: until `preemption_as_exception` begins anew, its signals change nothing any more."""
    _state.run_ended = True


def ignore_signals_after_command() -> None:
    """After its command this process only ends: a signal that would kill it then is ignored, lest it spoil the exit code."""
    _state.exits_after_command = True


def preemption_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM; SIGHUP of a terminal that is closed; SIGUSR1 and SIGUSR2, by which schedulers say that time is running out.

    But for SIGTERM, not those that the process was told to ignore, as by `nohup`.
    """
    notices = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return (signal.SIGTERM, *(each for each in notices if signal.getsignal(each) is not signal.SIG_IGN))


class SignalFilter:
    """Tells signals that ask for something from those that only repeat what was asked: for each process that counts them, one.

    The first asks for a stop; of the later ones those that count ask for the end at once. Ctrl-C does: it is a person's
    decision. So does SIGTERM, more than `REPEAT_SECONDS` after the first SIGTERM. The others are notices and never do.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = False
        self._terminated: float | None = None

    def accepts(self, number: int) -> bool:
        first, self._begun = not self._begun, True
        if number == signal.SIGTERM:
            if self._terminated is None:
                self._terminated = self._clock()
                return first
            return self._clock() - self._terminated > REPEAT_SECONDS
        return first or number == signal.SIGINT


def immediate_exit_code(number: int) -> ExitCode:
    """The exit code of a run that a second signal ends before it has saved: not that of one that has."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.KILLED


def print_from_handler(text: str) -> None:
    """To standard error, also from within a handler of a signal, where `print` may be in the middle of something."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"smalti: {text}\n".encode())


@contextmanager
def signal_handler(signals: Iterable[signal.Signals], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Meanwhile these signals call `handle`. In the main thread."""
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL and _state.exits_after_command:
                handler = signal.SIG_IGN
            if handler is not None:  # as it is for one that was not installed from Python, which cannot be put back
                signal.signal(number, handler)
