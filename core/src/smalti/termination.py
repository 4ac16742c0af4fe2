"""Signals that end a run, also where it cannot stop by itself: before its first step, after its last, during encoding."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast


class Stopped(KeyboardInterrupt):
    """Somebody asked the run to stop before its first step."""


class Terminated(KeyboardInterrupt):
    """A scheduler wants the process to end, or its terminal was closed.

    It unwinds like Ctrl-C, and like that no `except Exception` stops it.
    """


@contextmanager
def terminated() -> Iterator[None]:
    """Meanwhile the signals of `pre_emptions` raise `Terminated`, as Ctrl-C raises anyway. Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        raise Terminated

    with handled(pre_emptions(), handle):
        yield


def interrupt() -> None:
    """Raise `Terminated` in the main thread, from any other one. Only while `terminated` is in force there."""
    signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)


def pre_emptions() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that is closed, unless the process was told to ignore it, as by `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(signals: Iterable[signal.Signals], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Meanwhile these signals call `handle`. In the main thread."""
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
