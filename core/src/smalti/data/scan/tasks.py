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
    """Listed samples of a dataset, a file, and the file for their rows."""

    dataset: str
    listed: str
    rows: str


class Handed:
    """The tasks of the main rank, whose scan submits them from a thread of its own."""

    def __init__(self, ranks: int) -> None:
        self.limit = 2 * AT_ONCE * ranks
        """How many tasks may be submitted and not done: that many parts are in memory or on their way."""
        self._waiting: deque[Task] = deque()
        self._results: dict[str, Future[Path]] = {}
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Future[Path]:
        """Returns the file of the rows, once a rank has written it."""
        with self._lock:
            self._waiting.append(task)
            future = self._results[task.rows] = Future()
        return future

    def next(self) -> Task | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def done(self, rows: str) -> None:
        with self._lock:
            self._results.pop(rows).set_result(Path(rows))


def wait_for(path: Path) -> None:
    """Wait until a file that another node has written is visible here. Raises FileNotFoundError."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{path} was written by another rank, but is not visible here: is the run directory shared?"
            )
        time.sleep(0.1)
