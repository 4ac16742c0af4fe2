"""The process that uploads: `smalti mirror push RUN --watch`, started by the main rank of a run.

A line on standard input says that there is a new checkpoint. The end of standard input says that the run has ended, however it
ended: then the newest checkpoint is uploaded, also one that ranks have saved while they failed, and the process ends. It
prints one JSON object per line: {"ready": ...}, {"uploaded": ...} or {"failed": ...}. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from dataclasses import asdict
from typing import Literal

from smalti import UserError
from smalti.data import AccessDeniedError
from smalti_storage_s3.mirror.ownership import SupersededError
from smalti_storage_s3.mirror.upload import Uploader

Event = Literal["ready", "uploaded", "failed", "note"]
_PAUSES = (1.0, 5.0, 15.0, 30.0)
"""Seconds between attempts once the run has ended."""


def watch(uploader: Uploader, seconds: float) -> bool:
    """Upload until standard input ends, then for at most `seconds`. Returns whether the newest and the best have arrived."""
    emit("ready", number=uploader.lease.number)
    uploader.report = lambda sentence: emit("note", message=sentence)
    attempt(uploader)  # what an earlier launch has left
    while _wait_for_line():
        attempt(uploader)
    until = time.monotonic() + seconds
    for pause in (*_PAUSES, *([_PAUSES[-1]] * int(seconds // _PAUSES[-1]))):
        done, again = attempt(uploader)
        if done or not again or time.monotonic() + pause > until:
            return done
        time.sleep(pause)
    return False


def attempt(uploader: Uploader) -> tuple[bool, bool]:
    """Upload the newest checkpoint, then the best ones.

    Returns whether they are in the mirror, and otherwise whether another attempt can succeed.
    """
    try:
        uploaded = uploader.push_newest()
        if uploaded is not None:
            emit("uploaded", **asdict(uploaded))
        for each in uploader.push_best():
            emit("note", message=f"{each.name}, one of the best, is in {uploader.storage.location}")
    except (UserError, OSError) as error:
        fix = error.fix if isinstance(error, UserError) else ""
        emit("failed", message=error.message if isinstance(error, UserError) else str(error), fix=fix)
        return False, not isinstance(error, SupersededError | AccessDeniedError)
    try:
        uploader.rotate()
    except (UserError, OSError) as error:
        emit("note", message=f"old checkpoints stay in {uploader.storage.location}: {error}")
    return True, False


def emit(event: Event, **content: object) -> None:
    """Print an event. A parent that is gone does not read it."""
    try:
        sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the process ends


def _wait_for_line() -> bool:
    """Wait for a line, and take all lines that are there. False at the end of standard input."""
    descriptor = sys.stdin.fileno()
    if not os.read(descriptor, 4096):
        return False
    while select.select([descriptor], [], [], 0)[0]:
        if not os.read(descriptor, 4096):
            return False
    return True
