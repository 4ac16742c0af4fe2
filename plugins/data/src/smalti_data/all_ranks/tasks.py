"""Parts of a scan that the main rank hands out to other ranks, as files in the run directory."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

AT_ONCE = 2
"""Parts that a rank has at once: it does one while the next is on its way."""
VISIBLE_SECONDS = 90.0
"""How long a network file system may take to show what another node has written."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Part of the scan of a dataset, and the file `rows` for its result.

    The rows of the samples that the file `listed` has. Without it, a range of the listing itself: `most` files with keys after
    `after`, up to and with `until` (None: to the end); what is left of the range is cut into about `pieces`.
    """

    dataset: str
    rows: str
    listed: str = ""
    after: str = ""
    until: str | None = None
    most: int = 0
    pieces: int = 1


class Handed:
    """The tasks of the main rank, whose scan submits them from a thread of its own."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.limit = 2 * AT_ONCE * ranks
        """How many parts may be submitted and not done: that many are in memory or on their way."""
        self._parts: deque[Task] = deque()
        self._ranges: deque[Task] = deque()
        self._results: dict[str, Future[Path]] = {}
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Future[Path]:
        """Returns the file of the result, once a rank has written it."""
        with self._lock:
            (self._parts if task.listed else self._ranges).append(task)
            future = self._results[task.rows] = Future()
        return future

    def next(self) -> Task | None:
        """The next task: parts come first, since there are few of them as long as the listing is not ahead."""
        with self._lock:
            waiting = self._parts or self._ranges
            return waiting.popleft() if waiting else None

    def done(self, rows: str) -> None:
        with self._lock:
            future = self._results.pop(rows)
        future.set_result(Path(rows))  # callbacks may submit more


def wait_for(path: Path) -> None:
    """Wait until a file that another node has written is visible here. Raises FileNotFoundError."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{path} was written by another rank, but is not visible here: is the run directory shared?"
            )
        time.sleep(0.1)
