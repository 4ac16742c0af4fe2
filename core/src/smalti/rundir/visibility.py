"""How long a node waits to see what another one has written in the run directory, as the preflight has measured it."""

from __future__ import annotations

import json
import time
from pathlib import Path

PREFLIGHT_REPORT = Path("nodes", "preflight.json")
"""The last report of the preflight, in the run directory."""
_LONGEST_SECONDS = 90.0
_LEAST_SECONDS, _FACTOR = 2.0, 10.0
"""The storage may be busier than when it was measured."""


def visible_seconds(directory: Path) -> float:
    """How long files may take to be seen on other nodes; 0 if that was not measured for this run."""
    try:
        measured = json.loads((directory / PREFLIGHT_REPORT).read_bytes())["measured"]["visible_seconds"]
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
