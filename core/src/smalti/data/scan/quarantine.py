"""Samples that cannot be used: written down with the reason, counted, never deleted."""

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
    """This one sample cannot be used; the text is the reason, in words for the owner of the image."""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A sample that was set aside, and why. The file itself stays where it is."""

    dataset: str
    key: str
    reason: str


def write_quarantine(path: Path, items: Iterable[Quarantined]) -> None:
    """One JSON object per line; an empty file says that everything is fine."""
    atomic_write(path, b"".join(_line(item) for item in items))


def allowed_errors(budget: float, samples: int) -> int:
    """How many bad samples a budget allows: a share of `samples` when it is below 1, else that many.

    A share above 0 allows at least one, so that a single bad image never stops a small run; 0 allows none.
    """
    if budget >= 1:
        return int(budget)
    return max(1, int(budget * samples)) if budget > 0 else 0


class ErrorBudget:
    """Counts bad samples and says when there are too many. Safe to use from several threads.

    It raises nothing: a rank that stopped by itself would leave the others waiting. The loop reads `exhausted` and agrees
    with the other ranks on a stop.

    Args:
        allowed: how many bad samples are put up with in all.
        already: how many were found before training, by the scan.
        log: a JSON-lines file that gets each new one; every rank needs its own.
    """

    def __init__(self, *, allowed: int, already: int = 0, log: Path | None = None) -> None:
        self.allowed = allowed
        self.already = already
        self.exhausted: str | None = None
        """The sentence that says why the run should stop, once it should."""
        self.fix = "mend or remove such files, or raise --data_error_budget"
        self._log_file = log
        self._items: dict[tuple[str, str], Quarantined] = {}
        self._lock = threading.Lock()

    @property
    def items(self) -> tuple[Quarantined, ...]:
        """The bad samples found since the start, each once."""
        with self._lock:
            return tuple(self._items.values())

    def record(self, item: Quarantined) -> None:
        """Count a bad sample; one that is known already does not count again."""
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
        """Ask for a stop; the first message stays. `fix` is what helps, if not what helps against broken images."""
        if self.exhausted is None:
            self.exhausted, self.fix = message, fix or self.fix


def _line(item: Quarantined) -> bytes:
    return json.dumps(asdict(item), ensure_ascii=False).encode() + b"\n"
