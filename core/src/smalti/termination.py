"""SIGTERM where no run could stop by itself: before its first step, after its last, and while data are encoded."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """A scheduler wants the process to end. It unwinds like Ctrl-C, and like that no `except Exception` stops it."""


@contextmanager
def terminated() -> Iterator[None]:
    """Meanwhile SIGTERM raises `Terminated`, as Ctrl-C raises anyway. In the main thread."""

    def handle(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
