"""Being a run: the processes that own a run directory, from the first second of a launch to its end.

One launch at a time: its process makes the file `heartbeat` exclusively, before it looks at any data, touches it as long as it
lives and removes it when it leaves. The main rank, where that is another process, joins it, and then either keeps others out.
What dead processes left behind is taken over; where a process cannot be seen (another host, another container), it counts as
dead once its heartbeat has stood still for `STALE_SECONDS`.

Until the first step the launching process answers what is asked of the run, afterwards the main rank, between two steps.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import get_args
from uuid import uuid4

from smalti.errors import ExitCode, UserError
from smalti.rundir.directory import (
    BEAT_SECONDS,
    POLL_SECONDS,
    REFUSED,
    Condition,
    Heartbeat,
    Request,
    RequestKind,
    RunDirectory,
    RunRecord,
)
from smalti.rundir.events import EventWriter
from smalti.rundir.heartbeat import (
    add_worker,
    dead_heartbeat,
    in_use,
    refuse_foreign_files,
    remove_dead_heartbeat,
    take,
    write_record,
)
from smalti.rundir.phases import Phase, Phases
from smalti.rundir.restoring import Restorer
from smalti.system import Process

ATTEMPT_VARIABLE = "SMALTI_ATTEMPT"
"""Set in the processes of a launch: which attempt at the run they belong to."""
PHASE_SECONDS = 1.0
"""No more than one event in this time tells of phases; a shorter phase may stay untold."""

STOPPED_EARLY = "stopped on request before the first step; what was encoded is kept"

_log = logging.getLogger(__name__)


def prepare(
    directory: RunDirectory,
    *,
    name: str = "",
    config_digest: str = "",
    world_size: int = 1,
    mixed_precision: str | None = None,
) -> RunRecord:
    """Make a run directory, or make one ready to go on, and start nothing; its id, and its name unless given, stay.

    Files of others may lie beside the run's. UserError when a run lives there, or when one of the run's own files would
    overwrite something that is not the run's.
    """
    with _writing_to(directory):
        directory.path.mkdir(parents=True, exist_ok=True)
        known = directory.record()
        if known is None:
            refuse_foreign_files(directory)
        dead_heartbeat(directory)
        now = time.time()
        record = RunRecord(
            id=known.id if known else f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{uuid4().hex[:6]}",
            name=name or (known.name if known else directory.path.absolute().name),
            created=known.created if known else now,
            config_digest=config_digest,
            world_size=world_size,
            started=known.started if known else None,
            process=known.process if known else None,
            mixed_precision=mixed_precision or (known.mixed_precision if known else None),
        )
        write_record(directory, record)
    return record


def acquire(
    directory: RunDirectory,
    *,
    name: str = "",
    config_digest: str = "",
    world_size: int = 1,
    mixed_precision: str | None = None,
    on_stop: Callable[[], None] | None = None,
) -> RunWriter:
    """Become the run in this directory. UserError when another one lives there; of several that try at once one gets through.

    `on_stop` is called in a thread when a stop is asked for before the first step; without it, requests wait for the loop.
    Can take `STALE_SECONDS` when the run before died on another host just now.
    """
    before = directory.record() if directory.path.is_dir() else None
    record = prepare(directory, name=name, config_digest=config_digest, world_size=world_size, mixed_precision=mixed_precision)
    record = replace(record, started=time.time(), process=Process.current())
    with _writing_to(directory):
        if dead := dead_heartbeat(directory):
            remove_dead_heartbeat(directory, dead)
        try:
            take(directory, record)
        except FileExistsError:
            raise in_use(directory, directory.heartbeat()) from None
        write_record(directory, record)
        return RunWriter(directory, record, before=before, on_stop=on_stop)


@contextmanager
def _writing_to(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write to {directory.path}: {error.strerror or error}"
        raise UserError(message, fix="choose another --output_dir") from error


def join(directory: RunDirectory, *, config_digest: str = "", world_size: int = 1) -> RunWriter:
    """For the main rank: become the run beside the process that launched it, or alone if none did that holds the directory.

    UserError when another run lives there.
    """
    attempt, heartbeat, record = os.environ.get(ATTEMPT_VARIABLE), directory.heartbeat(), directory.record()
    if attempt is None or heartbeat is None or record is None or repr(heartbeat.started) != attempt:
        return acquire(directory, config_digest=config_digest, world_size=world_size)
    return RunWriter(directory, record, worker=Process.current())


class RunWriter:
    """The run's own hands on its directory: events, answers to requests, the heartbeat. Leave with `close`, or use `with`.

    A run that leaves without `end` or `end_launch` counts as failed. `phases` is what this process is busy with, and the
    events tell of it. `stop_request` is the request that ends the run before its first step, if there was one.
    """

    def __init__(
        self,
        directory: RunDirectory,
        record: RunRecord,
        *,
        before: RunRecord | None = None,
        on_stop: Callable[[], None] | None = None,
        worker: Process | None = None,
    ) -> None:
        self.directory = directory
        self.record = record
        self.phases = Phases()
        self.stop_request: Request | None = None
        self.events = EventWriter(directory.events_file)
        self._before = before
        self._on_stop = on_stop
        self._worker = worker
        self._new_owner: Heartbeat | None = None
        self._left_alone: set[Path] = set()
        self._training = False
        self._joined = False
        self._gone = False
        self._told: Phase | None = None
        self._told_at = -PHASE_SECONDS
        self._restorer = Restorer(directory)
        self._restoring = threading.Lock()
        self._errands: list[Request] = []
        self._asking = threading.Lock()
        self._closing = threading.Event()
        self._pulse = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        if worker is None:
            self.events.append("state", state="starting", message=str(record.process), world_size=record.world_size)
            self._refuse_requests("it was asked before this run started")
        else:
            add_worker(directory, record, worker)
        self._pulse.start()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the directory to others, unless the process that launched the run is still there.

        Requests that came too late get an answer.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._pulse.join()
        self._refuse_requests("the run has ended")
        self.events.close()
        self._restorer.close()
        last = self._worker is None or (self.record.process is not None and self.record.process.alive() is False)
        if last and self._holds(self.directory.heartbeat()):
            self.directory.heartbeat_file.unlink(missing_ok=True)

    def begin_training(self) -> None:
        """On the main rank, when everything is built: from now on the loop obeys what is asked of the run."""
        with self._asking:
            self._training = True
            self.record = replace(self.record, training_since=time.time())
            write_record(self.directory, self.record)

    def keep_files(self) -> None:
        """The files that say how the run is started have changed: they are those to restore if the directory is lost."""
        self._restorer.keep()

    # --- what is asked of the run -----------------------------------------------------------------------------------

    def take_requests(self) -> list[Request]:
        """What was asked since the last call, oldest first. Costs one look into a folder: call it between steps.

        Answer each with `acknowledge`. Files in `control/` that are no requests stay there.
        """
        if self._new_owner:
            return [
                Request(id="", kind="stop", details={"message": f"{self._new_owner.process} took over {self.directory.path}"})
            ]
        taken, self._errands = self._errands, []
        for path in sorted(self.directory.control.glob("*.json")):
            request = _read_request(path)
            if request is None:
                self._leave_alone(path)
                continue
            path.unlink(missing_ok=True)
            if request.kind in get_args(RequestKind):
                taken.append(request)
            else:
                self.acknowledge(request, accepted=False, message=f"a run cannot {request.kind}")
        return taken

    def acknowledge(self, request: Request, *, accepted: bool = True, message: str = "") -> None:
        """Answer a request, in words for whoever asked."""
        self.events.append(
            "control_ack",
            step=self.events.last_step,
            request=request.id,
            kind=request.kind,
            accepted=accepted,
            message=message,
        )

    def _refuse_requests(self, why: str) -> None:
        for request in self.take_requests():
            self.acknowledge(request, accepted=False, message=why)

    def _leave_alone(self, path: Path) -> None:
        if path not in self._left_alone:
            self._left_alone.add(path)
            self.events.append("warning", message=f"{path} is no request; it stays where it is")

    # --- what the run says ------------------------------------------------------------------------------------------

    def take_launch_files(self) -> None:
        """The loop begins: from here on the configuration of the launch is that of the run."""
        for file in (self.directory.config_file, self.directory.launch_file):
            with suppress(FileNotFoundError):
                self.directory.next_of(file).replace(file)
        self.keep_files()

    def end(self, step: int, condition: Condition, message: str, code: ExitCode) -> None:
        """The last word of the loop. Nothing may be recorded after it."""
        self._restore_if_lost(surely=True)
        self.events.append("state", step=step, state=condition, message=message, exit_code=code)

    def end_launch(self, code: ExitCode, message: str) -> None:
        """The last word of a launch, from the process that launched it, unless the run has said it itself.

        A launch that failed before its first step leaves a run that had made steps as it was.
        """
        self._restore_if_lost(surely=True)
        if self.directory.status().ended:
            return
        record = self.directory.record()
        condition: str = "failed"
        if self.stop_request or code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            condition = "stopped"
        elif code is ExitCode.DONE:
            condition = "finished"
        elif (record is None or record.training_since is None) and self._before and self.directory.latest("step"):
            condition = REFUSED
        self.events.append("state", step=self.events.last_step or None, state=condition, message=message, exit_code=code)
        if condition == REFUSED and self._before is not None:
            with suppress(OSError):
                write_record(self.directory, self._before)

    # --- the heartbeat ----------------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        failing, due = False, time.monotonic() + BEAT_SECONDS
        while not self._closing.wait(min(POLL_SECONDS, BEAT_SECONDS)) and not (self._new_owner and self._training):
            try:
                self._look_for_main_rank()
                self._restore_if_lost()
                if time.monotonic() >= due:
                    due = time.monotonic() + BEAT_SECONDS
                    self._beat()
                    failing = False
                self._tell_phase()
                self._answer_early()
            except (OSError, UserError) as error:
                if not failing:
                    _log.warning("%s: no heartbeat: %s", self.directory.heartbeat_file, error)
                failing = True

    def _look_for_main_rank(self) -> None:
        """Until the first step: whether it is another process, and has come."""
        if self._worker is None and not self._joined and not self._training:
            heartbeat = self.directory.heartbeat()
            self._joined = heartbeat is not None and heartbeat.worker is not None

    def _restore_if_lost(self, *, surely: bool = False) -> None:
        with self._restoring:
            if self._restorer.lost(surely=surely):
                self._restore()

    def _restore(self) -> None:
        """The directory was removed or moved away. Of a run's two processes the main rank makes it again."""
        if self._joined:
            self._restorer.follow(self.events)
            return
        there, heartbeat = self.directory.record(), self.directory.heartbeat()
        if (there and there.id != self.record.id) or (heartbeat and not self._holds(heartbeat)):
            self._give_way(heartbeat)
            return
        try:
            told = self._restorer.restore(self.events)
            write_record(self.directory, self.record)
            with suppress(FileExistsError):
                take(self.directory, self.record)
            if self._worker is not None:
                add_worker(self.directory, self.record, self._worker)
        except OSError as error:
            if not self._gone:
                _log.warning(
                    "%s is gone and cannot be made again: %s; nothing is saved until it can", self.directory.path, error
                )
            self._gone = True
            return
        self._gone = False
        _log.warning("%s", told)
        self.events.append("warning", step=self.events.last_step or None, message=told)
        if self._restorer.lost_encoded:
            gone = "the images and texts that were encoded ahead are gone with the run directory"
            self._errands.append(Request(id="", kind="stop", details={"reason": "lost data", "message": gone}))
        elif self._training:
            self._errands.append(Request(id="", kind="save"))

    def _beat(self) -> None:
        """One sign of life; a run that was silent for long may find that another one took its place."""
        heartbeat = self.directory.heartbeat()
        if heartbeat is None:
            with suppress(FileExistsError):  # of a run's two processes, the other one was quicker
                take(self.directory, self.record)
        elif not self._holds(heartbeat):
            self._give_way(heartbeat)
        elif self._worker is not None and heartbeat.worker is None:  # somebody removed it, and the launcher brought it back
            add_worker(self.directory, self.record, self._worker)
        else:
            os.utime(self.directory.heartbeat_file)

    def _give_way(self, heartbeat: Heartbeat | None) -> None:
        self._new_owner = heartbeat or Heartbeat(process=None, started=0.0, touched=0.0)
        _log.error("%s took over %s; this run stops", self._new_owner.process or "another run", self.directory.path)

    def _holds(self, heartbeat: Heartbeat | None) -> bool:
        return heartbeat is not None and (heartbeat.process, heartbeat.started) == (self.record.process, self.record.started)

    def _tell_phase(self) -> None:
        phase = self.phases.current
        if phase is None or phase == self._told or time.monotonic() - self._told_at < PHASE_SECONDS:
            return
        self._told, self._told_at = phase, time.monotonic()
        self.events.append("phase", phase=phase.name, begun=phase.begun, done=phase.done, total=phase.total, unit=phase.unit)

    def _answer_early(self) -> None:
        """Before the first step there is nothing to save, and a stop need not wait for anything."""
        if self._on_stop is None or self.stop_request:
            return
        with self._asking:
            if not self._training and (record := self.directory.record()) is not None:
                self._training = record.training_since is not None  # the main rank is another process
            for request in () if self._training else self.take_requests():
                if request.kind != "stop":
                    self.acknowledge(
                        request, accepted=False, message=f"before its first step there is nothing to {request.kind}"
                    )
                    continue
                if not self._new_owner:
                    self.acknowledge(request, message="stopping before the first step: there is nothing to save")
                self.stop_request = request
                self._on_stop()
                return


def _read_request(path: Path) -> Request | None:
    """A request is a JSON object with a `kind` and perhaps `details`; anything else is somebody's file."""
    try:
        content: object = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(kind := content.get("kind"), str):
        return None
    details = content.get("details")
    return Request(id=path.stem, kind=kind, details=details if isinstance(details, dict) else {})
