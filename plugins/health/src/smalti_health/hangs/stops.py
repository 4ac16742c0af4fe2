"""A request to stop that waits for ranks which make no progress."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from smalti import Config, RunState
from smalti.rundir import RunDirectory


def asked_since(directory: RunDirectory, state: RunState) -> float | None:
    """How many seconds ago this run was asked to stop, by a signal or a command; None if it was not."""
    ages = [] if state.stop_requested_at is None else [time.monotonic() - state.stop_requested_at]
    for path in directory.control.glob("*.json"):
        with suppress(OSError, ValueError, AttributeError):  # just taken, or no request: the loop says so
            if json.loads(path.read_text()).get("kind") == "stop":
                ages.append(max(0.0, time.time() - path.stat().st_mtime))
    return max(ages, default=None)


def grace_of(config: Config) -> float | None:
    """The seconds from a signal until the process is killed, if a package has that option and it is given."""
    value = config.value("grace_seconds") if "grace_seconds" in config.schema.options else None
    return float(value) if isinstance(value, int | float) else None
