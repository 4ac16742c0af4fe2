"""The stacks of all threads of a process, written when it gets a signal: also while it is stuck in a call to C."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from smalti.system import FOLDER_VARIABLE, Process

STACK_SIGNAL = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGURG
"""Not one that a scheduler, torch or a debugger sends. macOS has no real-time signals."""
_POLL_SECONDS = 0.05
_QUIET_SECONDS = 0.2
"""A dump is complete when its file has not grown for this long."""
_PREFIX = "smalti-stacks-"
_ABANDONED_SECONDS = 60.0
"""A folder that is older and whose files no process holds was left by a run that was killed."""


class StackDumps:
    """The files into which the ranks of this launch write their stacks; each opens its own. `rank` is that of this process.

    They are in the temporary folder of the launch, so a rank can read those of the other ranks of its node.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own = not os.environ.get(FOLDER_VARIABLE)
        if self._own:
            _clear_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX) if self._own else os.environ[FOLDER_VARIABLE])
        self._file: BinaryIO | None = None

    def open(self) -> None:
        """Write the stacks of this process into its file at each `STACK_SIGNAL`."""
        self._file = self._path(self._rank).open("wb", buffering=0)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """Leave the signal without an effect."""
        if self._file is None:
            return
        faulthandler.unregister(STACK_SIGNAL)
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        self._file.close()
        self._file = None
        if self._own:
            with suppress(OSError):
                self._path(self._rank).unlink()
                self._folder.rmdir()

    def collect(self, ranks: dict[int, Process], seconds: float) -> dict[int, str]:
        """The stacks of these ranks of this node, as far as they write them within `seconds`."""
        before = {rank: self._size(rank) for rank in ranks}
        for rank, process in ranks.items():
            if before[rank] is not None and process.alive():
                with suppress(OSError):
                    os.kill(process.pid, STACK_SIGNAL)
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        sizes, since = dict(before), time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = {rank: self._size(rank) for rank in ranks}
            if now != sizes:
                sizes, since = now, time.monotonic()
            grown = all(now[rank] != before[rank] for rank in ranks)
            if grown and time.monotonic() - since > _QUIET_SECONDS:
                break
        for rank in ranks:
            if (start := before[rank]) is not None and (self._size(rank) or 0) > start:
                found[rank] = self._path(rank).read_bytes()[start:].decode(errors="replace")
        return found

    def _path(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}.txt"

    def _size(self, rank: int) -> int | None:
        """The size of a file; None for a rank that has none, which the signal would kill."""
        try:
            return self._path(rank).stat().st_size
        except OSError:
            return None


def _clear_abandoned() -> None:
    """Remove the folders of single processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, of another user, or removed by another process
            if time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            for file in folder.glob("stacks-*.txt"):
                with file.open("rb") as opened:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while its process lives
                file.unlink()
            folder.rmdir()
