"""The heartbeat of a run: its processes, and the sign of life that they give through the run directory.

Clocks of nodes differ, and so do those of file servers. So the time of the file is never compared with a clock to decide
whether a run lives: what counts is that it changes, and for how long it has not changed on the clock of the process that looks.
How long a node waits to see what another one has written there is what the preflight has measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from smalti.system import Process, load_json, read_regular

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
"""A run whose process is not visible from here counts as dead when its heartbeat, watched, has not changed for this long."""
DOUBT_SECONDS = 2.5 * BEAT_SECONDS
"""The same for showing a run as stale, where the time of the file is far from the clock of the process that looks."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The processes that own the directory. Usually the file is only touched, which works on a full disk and is atomic.

    `process` launched the run; None if the file could not be read. `worker` is the main rank, if that is another process.
    `touched` is the modification time of the file, which is compared with other values of itself only.
    """

    process: Process | None
    started: float
    touched: float
    worker: Process | None = None

    def alive(self) -> bool | None:
        """Whether one of its processes still runs; None if that is unknown here."""
        found = [process.alive() for process in (self.process, self.worker) if process is not None] or [None]
        return True if True in found else None if None in found else False


class HeartbeatWatch:
    """What one process has seen of a heartbeat. `changed` is whether it has changed since the first look."""

    def __init__(self) -> None:
        self.changed = False
        self._seen: tuple[float, float] | None = None
        self._since: float | None = None
        self._silence = 0.0
        self._apparent_age = 0.0

    def look(self, read: Callable[[], Heartbeat | None]) -> Heartbeat | None:
        """Read the heartbeat. The clock is read before the file, so that a pause of this process makes no silence longer."""
        looked = time.monotonic()
        heartbeat = read()
        sign = None if heartbeat is None else (heartbeat.started, heartbeat.touched)
        if self._since is None or sign != self._seen:
            self.changed = self._since is not None
            self._seen, self._since = sign, time.monotonic()
        self._silence = max(0.0, looked - self._since)
        self._apparent_age = 0.0 if heartbeat is None else time.time() - heartbeat.touched
        return heartbeat

    @property
    def silence(self) -> float:
        """Seconds for which it has not changed, as far as this process has seen."""
        return self._silence

    @property
    def in_doubt(self) -> bool:
        """Whether it has not changed yet, and by this node's clock it should have: clocks differ, or the run is dead."""
        return not self.changed and self._silence <= DOUBT_SECONDS and abs(self._apparent_age) > STALE_SECONDS

    @property
    def stale(self) -> bool:
        """Whether to show the run as one without a heartbeat."""
        limit = DOUBT_SECONDS if not self.changed and abs(self._apparent_age) > STALE_SECONDS else STALE_SECONDS
        return self._silence > limit

    @property
    def age(self) -> float:
        """The age to show: what was seen, or by this node's clock if that is more and nothing speaks against it."""
        return max(self._silence, self._apparent_age if self.stale and not self.changed else 0.0)


PREFLIGHT_REPORT = Path("nodes", "preflight.json")
"""The last report of the preflight, in the run directory."""
_LONGEST_SECONDS = 90.0
_LEAST_SECONDS, _FACTOR = 2.0, 10.0
"""The storage may be busier than when it was measured."""


def visible_seconds(directory: Path) -> float:
    """How long files may take to be seen on other nodes; 0 if that was not measured for this run."""
    try:
        measured = load_json(read_regular(directory / PREFLIGHT_REPORT))["measured"]["visible_seconds"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
    return min(_LONGEST_SECONDS, _LEAST_SECONDS + _FACTOR * measured) if isinstance(measured, float | int) else 0.0


def wait_for_directory(path: Path, run_directory: Path) -> bool:
    """Wait until a directory that another node has made is seen here. Returns whether it is, after `visible_seconds`."""
    if path.is_dir():
        return True
    deadline = time.monotonic() + visible_seconds(run_directory)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if path.is_dir():
            return True
    return False
