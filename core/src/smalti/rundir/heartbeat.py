"""Exclusive ownership of a run directory: one launch at a time owns the heartbeat file. That of dead processes is replaced."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict

from smalti.errors import InUseError, UserError
from smalti.rundir.directory import POLL_SECONDS, RUN_KIND, SCHEMA, STALE_SECONDS, Heartbeat, RunDirectory, RunRecord
from smalti.system import Process, atomic_write

_EXIT_SECONDS = 60.0
"""How long a launch waits for an earlier one that has recorded its end and whose processes are still exiting."""
_OWN_FILES = ("run.json", "config.toml", "launch.json", "accelerate.yaml", "events.jsonl", "heartbeat")
_log = logging.getLogger(__name__)


def claim(directory: RunDirectory, record: RunRecord) -> None:
    """Create the heartbeat for the process of `record`. Raises FileExistsError if another process owns the directory."""
    with directory.heartbeat_file.open("x", encoding="utf-8") as file:
        file.write(_content(record, None))


def add_worker(directory: RunDirectory, record: RunRecord, worker: Process) -> None:
    """Add the main rank to the heartbeat of its launch: from now on either process owns the directory."""
    atomic_write(directory.heartbeat_file, _content(record, worker).encode())


def _content(record: RunRecord, worker: Process | None) -> str:
    assert record.process is not None
    content = {"process": asdict(record.process), "started": record.started}
    return json.dumps(content if worker is None else {**content, "worker": asdict(worker)})


def dead_heartbeat(directory: RunDirectory) -> Heartbeat | None:
    """The heartbeat that a dead run left, or None. Raises UserError if the run is alive.

    Waits while that is unknown, and for a run that has ended whose processes are still exiting.
    """
    first, started = directory.heartbeat(), time.monotonic()
    if first is None:
        return None
    waiting = False
    while (heartbeat := directory.heartbeat()) is not None:
        alive = heartbeat.alive()
        if alive is False or (alive is None and heartbeat.age > STALE_SECONDS):
            return heartbeat
        exiting = alive and heartbeat.started == first.started and directory.status().ended
        if exiting and time.monotonic() - started < _EXIT_SECONDS:
            what = "to exit"
        elif alive or heartbeat.touched != first.touched:
            raise in_use(directory, heartbeat)
        else:
            what = "to send a heartbeat"
        if not waiting:
            _log.warning("%s: waiting for %s %s", directory.path, heartbeat.process or "its run", what)
        waiting = True
        time.sleep(POLL_SECONDS)
    return None


def remove_dead_heartbeat(directory: RunDirectory, dead: Heartbeat) -> None:
    """Remove the heartbeat of a dead run; one process at a time, so that a slow one cannot remove the heartbeat of another."""
    lock = directory.path / ".takeover"
    try:
        lock.touch(exist_ok=False)
    except FileExistsError:
        raise InUseError(
            f"another process is taking over {directory.path} from a run that died",
            fix=f"choose another --output_dir; if there is no such process, remove {lock}",
        ) from None
    try:
        if directory.heartbeat() == dead:
            directory.heartbeat_file.unlink(missing_ok=True)
    finally:
        lock.unlink()


def in_use(directory: RunDirectory, heartbeat: Heartbeat | None) -> InUseError:
    who = str(heartbeat.process) if heartbeat and heartbeat.process else "another process"
    if heartbeat and heartbeat.worker and heartbeat.process and heartbeat.process.alive() is False:
        who = str(heartbeat.worker)
    if heartbeat and heartbeat.age > STALE_SECONDS:
        who += f", without a heartbeat for {heartbeat.age:.0f} s"
        remedy = "end that process"
    else:
        remedy = f"stop it with `smalti run stop {directory.path}`"
    return InUseError(
        f"{directory.path} is in use by a running process: {who}", fix=f"{remedy}, or choose another --output_dir"
    )


def refuse_foreign_files(directory: RunDirectory) -> None:
    taken = [name for name in _OWN_FILES if (directory.path / name).exists()]
    if directory.control.is_dir() and any(directory.control.iterdir()):
        taken.append("control/")
    if taken:
        raise UserError(
            f"{directory.path} is not a run directory, and a run would overwrite {', '.join(taken)} in it",
            fix="choose another --output_dir, or move these files",
        )


def write_record(directory: RunDirectory, record: RunRecord) -> None:
    content = {"kind": RUN_KIND, "schema": SCHEMA, **asdict(record)}
    atomic_write(directory.record_file, json.dumps(content, indent=2).encode() + b"\n")
