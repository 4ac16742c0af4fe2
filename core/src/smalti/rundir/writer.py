"""The run's side of a run directory: the processes that own it, from the start of a launch to its end.

One launch at a time: its process creates the file `heartbeat` exclusively before it scans any data, touches it as long as it
runs, and removes it at the end. The main rank, if it is another process, is added to it, and then either process owns the
directory. The directory of dead processes is taken over. A process that is not visible from here (another host, another
container) counts as dead once its heartbeat has not changed for `STALE_SECONDS` while it was watched. If it was not dead, it
stops as soon as it notices, and writes nothing more (`smalti.rundir.ownership`).

Until the first step, the launching process answers requests; afterwards the main rank does, between two steps.
"""

from __future__ import annotations

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
    POLL_SECONDS,
    REFUSED,
    RESTARTING,
    Condition,
    Request,
    RequestKind,
    RunDirectory,
    RunRecord,
)
from smalti.rundir.events import EventWriter
from smalti.rundir.heartbeat import BEAT_SECONDS, Heartbeat
from smalti.rundir.ownership import (
    Ownership,
    abandon_saves,
    add_worker,
    claim,
    dead_heartbeat,
    in_use,
    refuse_foreign_files,
    remove_dead_heartbeat,
    write_record,
)
from smalti.rundir.phases import Phase, Phases
from smalti.rundir.restoring import Restorer
from smalti.system import Process, load_json, read_regular

ATTEMPT_VARIABLE = "SMALTI_ATTEMPT"
"""The environment variable that identifies the attempt at the run to which a process belongs."""
GROUP_VARIABLE = "SMALTI_GENERATION"
"""The environment variable that is set in processes of a group of nodes that can start again."""
PHASE_SECONDS = 1.0
"""The least time between two events about phases. A shorter phase may be omitted."""

STOPPED_EARLY = "stopped on request before the first step; encoded samples are kept"

_log = logging.getLogger(__name__)


def prepare(
    directory: RunDirectory,
    *,
    name: str = "",
    config_digest: str = "",
    world_size: int = 1,
    mixed_precision: str | None = None,
) -> RunRecord:
    """Create a run directory, or prepare one to resume. Starts nothing. An existing id stays, and the name unless given.

    Other files may be in the directory. Raises UserError if a run uses it, or if a file of the run would overwrite one that is
    not of a run.
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
    """Acquire the run directory. Raises UserError if another run uses it; of several concurrent callers one succeeds.

    `on_stop` is called in a thread when a stop is requested before the first step. Without it, requests wait for the loop. This
    can take `STALE_SECONDS` if the previous run has just died on another host.
    """
    before = directory.record() if directory.path.is_dir() else None
    record = prepare(directory, name=name, config_digest=config_digest, world_size=world_size, mixed_precision=mixed_precision)
    record = replace(record, started=time.time(), process=Process.current())
    with _writing_to(directory):
        if dead := dead_heartbeat(directory):
            remove_dead_heartbeat(directory, dead)
        try:
            claim(directory, record)
        except FileExistsError:
            raise in_use(directory, directory.heartbeat()) from None
        write_record(directory, record)
        abandon_saves(directory)
        return RunWriter(directory, record, before=before, on_stop=on_stop)


@contextmanager
def _writing_to(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write to {directory.path}: {error.strerror or error}"
        raise UserError(message, fix="choose another --output_dir") from error


def join(directory: RunDirectory, *, config_digest: str = "", world_size: int = 1) -> RunWriter:
    """For the main rank: join the process that launched the run, or acquire the directory if no such process owns it.

    Raises UserError if another run uses it.
    """
    attempt, heartbeat, record = os.environ.get(ATTEMPT_VARIABLE), directory.heartbeat(), directory.record()
    if attempt is None or heartbeat is None or record is None or repr(heartbeat.started) != attempt:
        return acquire(directory, config_digest=config_digest, world_size=world_size)
    return RunWriter(directory, record, worker=Process.current())


class RunWriter:
    """Writes to a run directory for its run: events, answers to requests, the heartbeat. Close it, or use `with`.

    A run that ends without `end` or `end_launch` counts as failed. `phases` is the phase of this process, which is reported in
    the events. `stop_request` is the request that ended the run before its first step, if any. `ownership` says whether another
    launch has taken over the directory; then nothing is written any more. `answer_requests` is set by what handles requests in
    the loop, which calls it while it makes no steps.
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
        self.answer_requests: Callable[[], None] = lambda: None
        self.ownership = Ownership(directory, record.id, record.started)
        self.events = EventWriter(directory.events_file, self.ownership.holds)
        self._before = before
        self._on_stop = on_stop
        self._worker = worker
        self._ignored_files: set[Path] = set()
        self._training = False
        self._joined = False
        self._directory_lost = False
        self._reported: Phase | None = None
        self._reported_at = -PHASE_SECONDS
        self._restorer = Restorer(directory)
        self._restore_lock = threading.Lock()
        self._own_requests: list[Request] = []
        self._request_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        if worker is None:
            self._append_state("starting", str(record.process), world_size=record.world_size)
            self._refuse_requests("it was requested before this run started")
        else:
            add_worker(directory, record, worker)
        self._thread.start()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory, unless the process that launched the run still owns it. Refuses late requests.

        The main rank of a group of nodes leaves them to its launcher, which starts ranks again or ends the run.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        last = self._worker is None or (self.record.process is not None and self.record.process.alive() is False)
        if self.ownership.confirm() and (last or GROUP_VARIABLE not in os.environ):
            self._refuse_requests("the run has ended")
        self.events.close()
        self._restorer.close()
        if last and self._owns(self.directory.heartbeat()):
            self.directory.heartbeat_file.unlink(missing_ok=True)

    def begin_training(self) -> None:
        """On the main rank, when everything is built: from now on the loop handles requests."""
        with self._request_lock:
            self._training = True
            self.record = replace(self.record, training_since=time.time())
            if self.ownership.confirm():
                write_record(self.directory, self.record)

    def begin_generation(self, world_size: int) -> None:
        """The launch starts its ranks again: until they train, requests are answered here as before the first step."""
        with self._request_lock:
            self._training = self._joined = False
            self._before = None
            self.record = replace(self.record, training_since=None, world_size=world_size)
            if self.ownership.confirm():
                add_worker(self.directory, self.record, None)
                write_record(self.directory, self.record)
                self._append_state(RESTARTING, "the ranks are started again")

    def keep_files(self) -> None:
        """Remember the changed files that describe how the run was started, to restore them if the directory is lost."""
        self._restorer.keep()

    # --- requests ---------------------------------------------------------------------------------------------------

    def take_requests(self) -> list[Request]:
        """The requests since the last call, oldest first. Costs one listing of a folder: call it between steps.

        Answer each with `acknowledge`. Files in `control/` that are not requests stay there.
        """
        if not self.ownership.holds():
            return []
        taken, self._own_requests = self._own_requests, []
        for path in sorted(self.directory.control.glob("*.json")):
            request = _read_request(path)
            if request is None:
                self._ignore(path)
                continue
            path.unlink(missing_ok=True)
            if request.kind in get_args(RequestKind):
                taken.append(request)
            else:
                self.acknowledge(request, accepted=False, message=f"unknown request {request.kind!r}")
        return taken

    def acknowledge(self, request: Request, *, accepted: bool = True, message: str = "") -> None:
        """Answer a request, with a message for the sender."""
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

    def _ignore(self, path: Path) -> None:
        if path not in self._ignored_files:
            self._ignored_files.add(path)
            self.events.append("warning", message=f"{path} is not a request and is ignored")

    # --- state of the run -------------------------------------------------------------------------------------------

    def take_launch_files(self) -> None:
        """Called when the loop begins: from here on, the configuration of the launch is that of the run."""
        for file in (self.directory.config_file, self.directory.launch_file) if self.ownership.confirm() else ():
            with suppress(FileNotFoundError):
                self.directory.next_of(file).replace(file)
        self.keep_files()

    def end(self, step: int, condition: Condition, message: str, code: ExitCode, **fields: object) -> None:
        """Write the final state of the loop. No event may follow."""
        self._restore_if_lost(surely=True)
        self.ownership.confirm()
        if code in (ExitCode.GPU_FAULT, ExitCode.STOPPED) and GROUP_VARIABLE in os.environ:
            self._append_state(RESTARTING, message, step=step)  # its launcher decides
            return
        self._append_state(condition, message, step=step, exit_code=code, **fields)

    def end_launch(self, code: ExitCode, message: str) -> None:
        """Write the final state of a launch, in the process that launched it, unless the loop has written it already.

        A launch that failed before its first step does not change the status of a run that had made steps.
        """
        self._restore_if_lost(surely=True)
        if not self.ownership.confirm() or self.directory.status().ended:
            return
        record = self.directory.record()
        condition: str = "failed"
        if self.stop_request or code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.STOPPED):
            condition = "stopped"
        elif code is ExitCode.DONE:
            condition = "finished"
        elif (record is None or record.training_since is None) and self._before and self.directory.latest("step"):
            condition = REFUSED
        self._append_state(condition, message, step=self.events.last_step or None, exit_code=code)
        if condition == REFUSED and self._before is not None:
            with suppress(OSError):
                write_record(self.directory, self._before)

    def _append_state(self, state: str, message: str, *, step: int | None = None, **fields: object) -> None:
        """Write a state with the number of this attempt, so that it is not taken for one of an earlier attempt."""
        self.events.append("state", step=step, state=state, attempt=self.record.started, message=message, **fields)

    # --- the heartbeat ----------------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        failing, due = False, time.monotonic() + BEAT_SECONDS
        while not self._closing.wait(min(POLL_SECONDS, BEAT_SECONDS)) and not (self.ownership.lost and self._training):
            try:
                self._look_for_main_rank()
                self._restore_if_lost()
                if time.monotonic() >= due:
                    due = time.monotonic() + BEAT_SECONDS
                    self._beat()
                    failing = False
                self._report_phase()
                self._answer_before_first_step()
            except (OSError, UserError) as error:
                if not failing:
                    _log.warning("%s: no heartbeat: %s", self.directory.heartbeat_file, error)
                failing = True

    def _look_for_main_rank(self) -> None:
        """Until the first step: find out whether the main rank is another process that has joined."""
        if self._worker is None and not self._joined and not self._training:
            heartbeat = self.directory.heartbeat()
            self._joined = heartbeat is not None and heartbeat.worker is not None

    def _restore_if_lost(self, *, surely: bool = False) -> None:
        with self._restore_lock:
            if self._restorer.lost(surely=surely):
                self._restore()

    def _restore(self) -> None:
        """The directory was removed or moved. Of the two processes of a run, the main rank creates it again."""
        if self._joined:
            self._restorer.follow(self.events)
            return
        found, heartbeat = self.directory.record(), self.directory.heartbeat()
        if (found and found.id != self.record.id) or (heartbeat and not self._owns(heartbeat)):
            self.ownership.lose(heartbeat.process if heartbeat else None)
            return
        try:
            message = self._restorer.restore(self.events)
            write_record(self.directory, self.record)
            with suppress(FileExistsError):
                claim(self.directory, self.record)
            if self._worker is not None:
                add_worker(self.directory, self.record, self._worker)
        except OSError as error:
            if not self._directory_lost:
                _log.warning(
                    "%s is missing and cannot be created again: %s; nothing is saved until then", self.directory.path, error
                )
            self._directory_lost = True
            return
        self._directory_lost = False
        _log.warning("%s", message)
        self.events.append("warning", step=self.events.last_step or None, message=message)
        if self._restorer.lost_encoded:
            lost = "the encoded images and texts were lost with the run directory"
            self._own_requests.append(Request(id="", kind="stop", details={"reason": "lost data", "message": lost}))
        elif self._training:
            self._own_requests.append(Request(id="", kind="save"))

    def _beat(self) -> None:
        """Touch the heartbeat. A run that was suspended for long may find that another one has taken over the directory."""
        if not self.ownership.confirm():
            return
        heartbeat = self.directory.heartbeat()
        if heartbeat is None:
            with suppress(FileExistsError):  # the other process of the run was faster
                claim(self.directory, self.record)
        elif self._worker is not None and heartbeat.worker is None:  # it was removed, and the launcher created it again
            add_worker(self.directory, self.record, self._worker)
        else:
            os.utime(self.directory.heartbeat_file)

    def _owns(self, heartbeat: Heartbeat | None) -> bool:
        return heartbeat is not None and (heartbeat.process, heartbeat.started) == (self.record.process, self.record.started)

    def _report_phase(self) -> None:
        phase = self.phases.current
        if phase is None or phase == self._reported or time.monotonic() - self._reported_at < PHASE_SECONDS:
            return
        self._reported, self._reported_at = phase, time.monotonic()
        self.events.append("phase", phase=phase.name, begun=phase.begun, done=phase.done, total=phase.total, unit=phase.unit)

    def _answer_before_first_step(self) -> None:
        """Before the first step there is nothing to save, and a stop takes effect at once."""
        if self._on_stop is None or self.stop_request:
            return
        with self._request_lock:
            if self.ownership.lost and not self._training:
                self.stop_request = Request(id="", kind="stop")
                self._on_stop()
                return
            if not self._training and (record := self.directory.record()) is not None:
                self._training = record.training_since is not None  # the main rank is another process
            for request in () if self._training else self.take_requests():
                if request.kind != "stop":
                    self.acknowledge(
                        request, accepted=False, message=f"before its first step there is nothing to {request.kind}"
                    )
                    continue
                self.acknowledge(request, message="stopping before the first step: there is nothing to save")
                self.stop_request = request
                self._on_stop()
                return


def _read_request(path: Path) -> Request | None:
    """Read a request: a JSON object with a `kind` and perhaps `details`. None if the file is anything else."""
    try:
        content: object = load_json(read_regular(path))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(kind := content.get("kind"), str):
        return None
    details = content.get("details")
    return Request(id=path.stem, kind=kind, details=details if isinstance(details, dict) else {})
