"""The nodes that wait for the next generation, as files in the run directory: `nodes/waiting-RANK`.

Importing this module imports no torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from smalti.rundir import POLL_SECONDS

_COUNT_SECONDS = 20.0
"""A new host waits this long for the others, if fewer than it expects are there."""
_BEAT_SECONDS = 1.0
"""How often a node that waits for the next generation shows that it is there."""
_GONE_SECONDS = 15.0
"""One whose file has not changed for this long does not wait any more."""


class WaitingNodes:
    """The nodes that wait for the next generation, in this folder. Clocks are not compared: what changes is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beat = 0
        self._shown = -_BEAT_SECONDS

    def show(self, machine_rank: int) -> None:
        """Show that this node is there; to be called often."""
        if time.monotonic() - self._shown < _BEAT_SECONDS:
            return
        self._shown, self._beat = time.monotonic(), self._beat + 1
        with suppress(OSError):  # then this node is not counted, and waits as a spare
            self._folder.mkdir(exist_ok=True)
            Path(self._folder, f"waiting-{machine_rank}").write_text(f"{secrets.token_hex(4)} {self._beat}")

    def there(self, expected: int, *, except_rank: int) -> list[int]:
        """Which others are there. Waits `_COUNT_SECONDS` if they are fewer than expected."""
        before, there = self.read(except_rank), set[str]()
        deadline = time.monotonic() + _COUNT_SECONDS
        while len(there) < expected and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            there |= {name for name, text in self.read(except_rank).items() if text and before.get(name) != text}
        return sorted(int(name.removeprefix("waiting-")) for name in there)

    def read(self, except_rank: int = -1) -> dict[str, str]:
        """The content of each file, by its name."""
        found = {}
        for path in self._folder.glob("waiting-*"):
            with suppress(OSError):
                found[path.name] = path.read_text()
        found.pop(f"waiting-{except_rank}", None)
        return found


class SteadyNodes:
    """Which nodes have waited for some seconds without a pause. Call `look` every few seconds."""

    def __init__(self, folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = WaitingNodes(folder)
        self._seconds = seconds
        self._clock = clock
        self._before: dict[str, str] = {}
        self._seen: dict[int, tuple[float, float]] = {}

    def look(self) -> list[int]:
        """Their numbers. Files that an earlier generation has left do not change, and count for nothing."""
        now, found = self._clock(), self._waiting.read()
        for name, text in found.items():
            if text and name in self._before and self._before[name] != text:
                rank = int(name.removeprefix("waiting-"))
                since, changed = self._seen.get(rank, (now, now))
                self._seen[rank] = (since if now - changed <= _GONE_SECONDS else now), now
        self._before = found
        return sorted(
            rank
            for rank, (since, changed) in self._seen.items()
            if now - changed <= _GONE_SECONDS and now - since >= self._seconds
        )
