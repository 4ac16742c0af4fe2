"""Unusable samples: recorded with the reason, counted, never deleted."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from smalti.system import atomic_write

_log = logging.getLogger(__name__)


class BadSampleError(Exception):
    """One sample cannot be used; the text is the reason, for the user."""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """An unusable sample, and the reason. The file itself is not touched."""

    dataset: str
    key: str
    reason: str


def write_quarantine(path: Path, items: Iterable[Quarantined]) -> None:
    """Write one JSON object per line; the file is empty if all samples are usable."""
    atomic_write(path, b"".join(_line(item) for item in items))


def allowed_errors(budget: float, samples: int) -> int:
    """Returns how many unusable samples a budget allows: a share of `samples` if it is below 1, else that number.

    A share above 0 allows at least one, so that a single bad image never stops a small run; 0 allows none.
    """
    if budget >= 1:
        return int(budget)
    return max(1, int(budget * samples)) if budget > 0 else 0


class ErrorBudget:
    """Counts unusable samples, up to a limit. Safe to use from several threads.

    It does not raise: a rank that stopped alone would leave the others waiting. The loop reads `exhausted`, and all ranks stop
    together.

    Args:
        allowed: how many unusable samples are tolerated in total.
        already: how many were found before training, by the scan.
        log: a JSON-lines file to which each new one is appended; every rank needs its own.
    """

    def __init__(self, *, allowed: int, already: int = 0, log: Path | None = None) -> None:
        self.allowed = allowed
        self.already = already
        self.exhausted: str | None = None
        """Why the run should stop; None as long as it should not."""
        self.fix = "fix or remove such files, or raise --data_error_budget"
        self._log_file = log
        self._items: dict[tuple[str, str], Quarantined] = {}
        self._lock = threading.Lock()

    @property
    def items(self) -> tuple[Quarantined, ...]:
        """The unusable samples found since the start, each once."""
        with self._lock:
            return tuple(self._items.values())

    def record(self, item: Quarantined) -> None:
        """Count an unusable sample, unless it was counted before."""
        with self._lock:
            if (item.dataset, item.key) in self._items:
                return
            self._items[item.dataset, item.key] = item
            count = self.already + len(self._items)
            if self._log_file is not None:
                with self._log_file.open("ab") as file:
                    file.write(_line(item))
        _log.warning("quarantined %s of dataset %s: %s", item.key, item.dataset, item.reason)
        if count > self.allowed:
            self.exhaust(
                f"{count} samples cannot be used, more than the error budget of {self.allowed}; the last one is {item.key} of"
                f" dataset {item.dataset}: {item.reason}"
            )

    def exhaust(self, message: str, fix: str = "") -> None:
        """Request a stop; the first message is kept. `fix` replaces the advice about broken images."""
        if self.exhausted is None:
            self.exhausted, self.fix = message, fix or self.fix


def _line(item: Quarantined) -> bytes:
    return json.dumps(asdict(item), ensure_ascii=False).encode() + b"\n"
