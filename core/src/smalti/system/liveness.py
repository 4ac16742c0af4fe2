"""Whether a rank that does not leave makes progress with a save: asked before it is ended for being stuck.

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
    """Of this process; its launcher finds the time of the latest in the file of the rank's last words."""

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
    """Something of a save was done: a piece copied, written or read back. Costs next to nothing, from any thread."""
    _progress.note()


def exit_within(seconds: float, code: int) -> None:
    """End this process with `code` once it has neither ended nor made progress with a save for so long.

    For ranks that fail: what is closed last may wait for ranks that will not answer.
    """
    begun = time.monotonic()

    def end() -> None:
        while (left := seconds - min(time.monotonic() - begun, _progress.age())) > 0:
            time.sleep(left)
        flush_standard_streams()
        os._exit(code)

    threading.Thread(target=end, name="smalti-leave", daemon=True).start()


def latest_progress(rank: int) -> float:
    """When this rank of the launch last told of progress, in seconds since the epoch; 0 if it never did."""
    try:
        return exit_report_file(rank).stat().st_mtime
    except OSError:
        return 0.0
