"""Progress of a rank that is saving, which the launcher checks before it kills a rank that does not exit.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from smalti.system.exit import flush_standard_streams
from smalti.system.exit_reports import exit_report_file, launched

_EVERY_SECONDS = 1.0


class _Progress:
    """The latest progress of this process. The launcher reads it as the modification time of the rank's exit report file."""

    def __init__(self) -> None:
        self._latest = time.monotonic()

    def note(self) -> None:
        now = time.monotonic()
        if now - self._latest < _EVERY_SECONDS:
            return
        self._latest = now
        if launched():
            with suppress(OSError):
                os.utime(exit_report_file())

    def age(self) -> float:
        return time.monotonic() - self._latest


_progress = _Progress()


def note_progress() -> None:
    """Note that a save made progress: a chunk was copied, written or read back. Cheap, and callable from any thread."""
    _progress.note()


def seconds_without_progress() -> float:
    """Since the latest progress of a save in this process, or since its start."""
    return _progress.age()


def exit_within(seconds: float, code: int) -> None:
    """Exit this process with `code` if it has not ended, and its save has made no progress, for `seconds`.

    For ranks that fail: closing resources may wait for other ranks that will never answer.
    """
    started = time.monotonic()

    def exit_after_timeout() -> None:
        while (remaining := seconds - min(time.monotonic() - started, _progress.age())) > 0:
            time.sleep(remaining)
        flush_standard_streams()
        os._exit(code)

    threading.Thread(target=exit_after_timeout, name="smalti-exit", daemon=True).start()


def latest_progress(rank: int) -> float:
    """When this rank of the launch last made progress, in unix seconds; 0 if never."""
    try:
        return exit_report_file(rank).stat().st_mtime
    except OSError:
        return 0.0
