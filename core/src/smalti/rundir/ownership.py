"""Exclusive ownership of a run directory: one launch at a time owns the heartbeat file. That of dead processes is replaced.

What a launch that was taken over must not do is prevented in three ways. Its events, requests and images stop as soon as it
knows. A checkpoint becomes visible only after a look at the heartbeat. And what it was saving when it was taken over is renamed
by the new owner before that chooses the checkpoint from which it resumes, so that it cannot become visible after the look.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from smalti.errors import InUseError, TakenOverError, UserError
from smalti.rundir.directory import POLL_SECONDS, RUN_KIND, SCHEMA, RunDirectory, RunRecord
from smalti.rundir.heartbeat import STALE_SECONDS, Heartbeat
from smalti.system import Process, atomic_write

LEASE_SECONDS = 15.0
"""A launch that has not seen its own heartbeat for this long looks before it writes. Half of what a new owner waits."""
_EXIT_SECONDS = 60.0
"""How long a launch waits for an earlier one that has recorded its end and whose processes are still exiting."""
_OWN_FILES = ("run.json", "config.toml", "launch.json", "accelerate.yaml", "events.jsonl", "heartbeat")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It counts the time for which the machine was suspended."""
_log = logging.getLogger(__name__)


class Ownership:
    """Whether a launch still owns its run directory. `on_lost` is called once, in any thread, when it is found not to.

    `started` identifies the launch. Ranks that do not write the heartbeat can have one too (`of`).
    """

    def __init__(self, directory: RunDirectory, run_id: str, started: float | None) -> None:
        self.on_lost: Callable[[], None] = lambda: None
        self._directory = directory
        self._run_id = run_id
        self._started = started
        self._new_owner = ""
        self._confirmed = time.clock_gettime(_CLOCK)

    @classmethod
    def of(cls, directory: RunDirectory) -> Ownership:
        """That of the launch whose record is there now. A node that does not share the directory has none: it always holds."""
        record = directory.record()
        return cls(directory, record.id if record else "", record.started if record else None)

    @property
    def lost(self) -> bool:
        return bool(self._new_owner)

    @property
    def message(self) -> str:
        """Who has taken over; "" while it holds."""
        return f"{self._new_owner} has taken over {self._directory.path}" if self._new_owner else ""

    def holds(self) -> bool:
        """Whether to write. Looks at the heartbeat only if it was not seen for `LEASE_SECONDS`."""
        return not self.lost and (time.clock_gettime(_CLOCK) - self._confirmed < LEASE_SECONDS or self.confirm())

    def check(self) -> None:
        """Look now. Raises TakenOverError if another launch owns the directory."""
        if not self.confirm():
            raise TakenOverError(f"{self.message}, so nothing more is written there", fix="watch the run that has taken over")

    def confirm(self) -> bool:
        """Look now. True also if the directory is missing, or does not answer: then nobody is known to have taken over."""
        if self._started is None or self.lost:
            return not self.lost
        looked = time.clock_gettime(_CLOCK)
        try:
            heartbeat = self._directory.heartbeat()
            if heartbeat is None or heartbeat.process is None:
                record = self._directory.record()
                taken = record is not None and (record.id, record.started) != (self._run_id, self._started)
                who = record.process if record is not None else None
            else:
                taken, who = heartbeat.started != self._started, heartbeat.process
        except (OSError, UserError):
            return True
        if taken:
            self.lose(who)
            return False
        self._confirmed = looked
        return True

    def lose(self, who: Process | None) -> None:
        """Note that another launch owns the directory."""
        if self.lost:
            return
        self._new_owner = str(who or "another run")
        _log.error("%s; this run stops and writes nothing more there", self.message)
        self.on_lost()


def claim(directory: RunDirectory, record: RunRecord) -> None:
    """Create the heartbeat for the process of `record`. Raises FileExistsError if another process owns the directory."""
    with directory.heartbeat_file.open("x", encoding="utf-8") as file:
        file.write(_content(record, None))


def add_worker(directory: RunDirectory, record: RunRecord, worker: Process | None) -> None:
    """Add the main rank to the heartbeat of its launch: from now on either process owns the directory. None removes it."""
    atomic_write(directory.heartbeat_file, _content(record, worker).encode())


def _content(record: RunRecord, worker: Process | None) -> str:
    assert record.process is not None
    content = {"process": asdict(record.process), "started": record.started}
    return json.dumps(content if worker is None else {**content, "worker": asdict(worker)})


def dead_heartbeat(directory: RunDirectory) -> Heartbeat | None:
    """The heartbeat that a dead run left, or None. Raises UserError if the run is alive.

    That of processes that are not visible here is watched for `STALE_SECONDS`: only a change, or none, says something. Waits as
    well for a run that has ended whose processes are still exiting.
    """
    watch, begun, first, waiting = directory.heartbeat_watch, time.monotonic(), directory.watch_heartbeat(), False
    while (heartbeat := directory.watch_heartbeat()) is not None and first is not None:
        alive = heartbeat.alive()
        if alive is False or (alive is None and watch.silence > STALE_SECONDS):
            return heartbeat
        exiting = alive and heartbeat.started == first.started and directory.status().ended
        if exiting and time.monotonic() - begun < _EXIT_SECONDS:
            what = "to exit"
        elif (heartbeat.started, heartbeat.touched) != (first.started, first.touched) or (alive and not watch.in_doubt):
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


def abandon_saves(directory: RunDirectory) -> None:
    """Rename what earlier launches were saving, so that it cannot become visible. The next save removes it."""
    for unfinished in directory.checkpoints.glob(".partial-*"):
        with suppress(OSError):
            unfinished.rename(unfinished.with_name(unfinished.name.replace(".partial-", ".removed-", 1)))


def in_use(directory: RunDirectory, heartbeat: Heartbeat | None) -> InUseError:
    who, watch = str(heartbeat.process) if heartbeat and heartbeat.process else "another process", directory.heartbeat_watch
    if heartbeat and heartbeat.worker and heartbeat.process and heartbeat.process.alive() is False:
        who = str(heartbeat.worker)
    if heartbeat and watch.stale:
        who += f", without a heartbeat for {watch.age:.0f} s"
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
