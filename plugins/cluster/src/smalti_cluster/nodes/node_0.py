"""The launch on node 0, as another node sees it. Importing this module imports no torch."""

from __future__ import annotations

import time

from smalti import ExitCode
from smalti.launch import LaunchResult
from smalti.rundir import RunDirectory

_CHECK_SECONDS = 1.0


class LaunchOfNode0:
    """The same launch on node 0, as seen in the run directory by another node. `attempt` is its own; None for the one now."""

    def __init__(self, directory: RunDirectory, attempt: float | None = None) -> None:
        self._directory = directory
        heartbeat = directory.heartbeat()
        self._attempt = attempt or (heartbeat.started if heartbeat is not None else None)
        self._checked_at = time.monotonic()

    def stopped_early(self) -> LaunchResult | None:
        """Its result if it was stopped before its first step. Checks once every `_CHECK_SECONDS`."""
        if self._attempt is None or time.monotonic() - self._checked_at < _CHECK_SECONDS:
            return None
        self._checked_at = time.monotonic()
        record, heartbeat = self._directory.record(), self._directory.heartbeat()
        if heartbeat is not None or record is None or record.started != self._attempt or record.training_since is not None:
            return None
        status = self._directory.status()
        return (ExitCode(status.exit_code or 0), status.message) if status.condition == "stopped" else None
