"""The free space of the run directory. The main rank looks at it between steps; all ranks agree on what follows."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from smalti.config import CheckpointOptions
from smalti.errors import UserError
from smalti.plugins import warn
from smalti.system import format_bytes, free_bytes, parse_bytes
from smalti.types import StopReason

if TYPE_CHECKING:
    from smalti.training.run import Run

CHECK_SECONDS = 5.0
"""How often the file system is asked while steps are made. It costs a system call, on shared storage a round trip."""
_PAUSE_SECONDS = 1.0
_THEN = {"pause": ": no steps are made until there is room", "stop": ": saving and stopping", "warn": ""}
_ROOM = 1.1
"""There is room again at this multiple of the limit, so that a run does not pause at every step."""


class DiskSpace:
    """On the main rank: whether the run directory is short of space."""

    def __init__(self) -> None:
        self._checked = -math.inf
        self._low = False

    def pauses(self, run: Run) -> bool:
        """Whether no step is to be made now. Reports changes, and requests a stop where that was chosen. On every rank."""
        options = run.config[CheckpointOptions]
        if run.world.is_main and options.disk_low is not None:
            self._look(run, options, parse_bytes(options.disk_low))
        return self._low and options.on_disk_low == "pause"

    def _look(self, run: Run, options: CheckpointOptions, limit: int) -> None:
        if time.monotonic() - self._checked < (_PAUSE_SECONDS if self._low else CHECK_SECONDS):
            return
        self._checked = time.monotonic()
        try:
            free = free_bytes(run.directory.path)
        except OSError:  # the directory is missing or does not answer, which others report
            return
        if free is None or (free < limit * (_ROOM if self._low else 1.0)) == self._low:
            return
        self._low = not self._low
        message, fix = f"{run.directory.path} has {format_bytes(free)} free", ""
        if self._low:
            message, fix = f"{message}, less than disk_low={options.disk_low}{_THEN[options.on_disk_low]}", "free space there"
            if options.on_disk_low == "stop":
                run.state.request_stop(StopReason.DISK_LOW, message)
        else:
            message += " again: training continues" if options.on_disk_low == "pause" else " again"
        warn(run.plugins, run.state, message, UserError(message, fix=fix))


def wait(run: Run) -> None:
    """Make no step for a moment. Requests to the run are answered."""
    time.sleep(_PAUSE_SECONDS)
    run.phases.note_progress()
    if run.info.writer is not None:
        run.info.writer.answer_requests()
