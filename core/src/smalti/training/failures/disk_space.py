"""The free space of the run directory. The main rank looks at it between steps; all ranks agree on what follows."""

from __future__ import annotations

import math
import time

from smalti.config import CheckpointOptions, Config
from smalti.errors import UserError
from smalti.plugins import Plugins, warn
from smalti.rundir import Phases, RunDirectory, RunWriter
from smalti.system import format_bytes, free_bytes, parse_bytes
from smalti.types import RunState, StopReason

CHECK_SECONDS = 5.0
"""How often the file system is asked while steps are made. It costs a system call, on shared storage a round trip."""
_PAUSE_SECONDS = 1.0
_THEN = {"pause": ": no steps are made until there is room", "stop": ": saving and stopping", "warn": ""}
_ROOM = 1.1
"""There is room again at this multiple of the limit, so that a run does not pause at every step."""


class DiskSpace:
    """On the main rank: whether the run directory is short of space."""

    def __init__(self, config: Config, plugins: Plugins, directory: RunDirectory) -> None:
        self._options = config[CheckpointOptions]
        self._plugins = plugins
        self._directory = directory.path
        self._checked = -math.inf
        self._low = False

    def pauses(self, state: RunState, *, is_main: bool) -> bool:
        """Whether no step is to be made now. Reports changes, and requests a stop where that was chosen. On every rank."""
        if is_main and self._options.disk_low is not None:
            self._look(state, parse_bytes(self._options.disk_low))
        return self._low and self._options.on_disk_low == "pause"

    def _look(self, state: RunState, limit: int) -> None:
        if time.monotonic() - self._checked < (_PAUSE_SECONDS if self._low else CHECK_SECONDS):
            return
        self._checked = time.monotonic()
        try:
            free = free_bytes(self._directory)
        except OSError:  # the directory is missing or does not answer, which others report
            return
        if free is None or (free < limit * (_ROOM if self._low else 1.0)) == self._low:
            return
        self._low, then = not self._low, self._options.on_disk_low
        message, fix = f"{self._directory} has {format_bytes(free)} free", ""
        if self._low:
            message, fix = f"{message}, less than disk_low={self._options.disk_low}{_THEN[then]}", "free space there"
            if then == "stop":
                state.request_stop(StopReason.DISK_LOW, message)
        else:
            message += " again: training continues" if then == "pause" else " again"
        warn(self._plugins, state, message, UserError(message, fix=fix))


def wait(phases: Phases, writer: RunWriter | None) -> None:
    """Make no step for a moment. Requests to the run are answered, by its `writer` on the main rank."""
    time.sleep(_PAUSE_SECONDS)
    phases.note_progress()
    if writer is not None:
        writer.answer_requests()
