"""Being a run: the process that owns a run directory while it trains. Rank 0 only; all others read `smalti.rundir`.

One process at a time: it makes the file `heartbeat` exclusively, touches it as long as it lives and removes it when it leaves.
What a dead process left behind is taken over; where its process cannot be seen (another host, another container), it counts
as dead once its heartbeat has stood still for `STALE_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import get_args
from uuid import uuid4

from smalti.errors import ExitCode, UserError
from smalti.events import EventWriter
from smalti.files import atomic_write
from smalti.process import Process
from smalti.rundir import (
    BEAT_SECONDS,
    POLL_SECONDS,
    RUN_KIND,
    SCHEMA,
    STALE_SECONDS,
    Condition,
    Heartbeat,
    Request,
    RequestKind,
    RunDirectory,
    RunRecord,
)
from smalti.types import (
    Checkpoint,
    EvaluationResult,
    Outcome,
    RunInfo,
    RunState,
    StepResult,
    StopReason,
    ValidationResult,
)

_OWN_FILES = ("run.json", "config.toml", "launch.json", "accelerate.yaml", "events.jsonl", "heartbeat")
_log = logging.getLogger(__name__)


def prepare(
    directory: RunDirectory,
    *,
    name: str = "",
    config_digest: str = "",
    world_size: int = 1,
    mixed_precision: str | None = None,
) -> RunRecord:
    """Make a run directory, or make one ready to go on; its id stays, and so do name and precision unless given.

    For the launcher, before it writes anything there. Files of others may lie beside the run's. UserError when a run lives
    there, or when one of the run's own files would overwrite something that is not the run's.
    """
    path = directory.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        known = directory.record()
        if known is None:
            _refuse_foreign_files(directory)
        _dead_heartbeat(directory)
        now = time.time()
        record = RunRecord(
            id=known.id if known else f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{uuid4().hex[:6]}",
            name=name or (known.name if known else path.absolute().name),
            created=known.created if known else now,
            config_digest=config_digest,
            world_size=world_size,
            started=known.started if known else None,
            process=known.process if known else None,
            mixed_precision=mixed_precision or (known.mixed_precision if known else None),
        )
        _write_record(directory, record)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror or error}", fix="choose another --output_dir") from error
    return record


def acquire(directory: RunDirectory, *, name: str = "", config_digest: str = "", world_size: int = 1) -> LiveRun:
    """Become the run in this directory. UserError when another one lives there; of several that try at once one gets through.

    Can take `STALE_SECONDS` when the run before died on another host just now.
    """
    record = prepare(directory, name=name, config_digest=config_digest, world_size=world_size)
    record = replace(record, started=time.time(), process=Process.current())
    if dead := _dead_heartbeat(directory):
        _clear_away(directory, dead)
    try:
        _write_heartbeat(directory, record)
    except FileExistsError:
        raise _in_use(directory, directory.heartbeat()) from None
    _write_record(directory, record)
    return LiveRun(directory, record)


class LiveRun:
    """The run's own hands on its directory: events, answers to requests, the heartbeat. Leave with `close`, or use `with`.

    A run that leaves without `record_end` counts as failed.
    """

    def __init__(self, directory: RunDirectory, record: RunRecord) -> None:
        self.directory = directory
        self.record = record
        self.events = EventWriter(directory.events_file)
        self._error: BaseException | None = None
        self._usurper: Heartbeat | None = None
        self._left_alone: set[Path] = set()
        self._closing = threading.Event()
        self._pulse = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self.events.append("state", state="starting", message=str(record.process), world_size=record.world_size)
        self._refuse_requests("it was asked before this run started")
        self._pulse.start()

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the directory to others. Requests that came too late get an answer."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._pulse.join()
        self._refuse_requests("the run has ended")
        self.events.close()
        if self._holds(self.directory.heartbeat()):
            self.directory.heartbeat_file.unlink(missing_ok=True)

    # --- what is asked of the run -----------------------------------------------------------------------------------

    def take_requests(self) -> list[Request]:
        """What was asked since the last call, oldest first. Costs one look into a folder: call it between steps.

        Answer each with `acknowledge`. Files in `control/` that are no requests stay there.
        """
        if self._usurper:
            return [
                Request(id="", kind="stop", details={"message": f"{self._usurper.process} took over {self.directory.path}"})
            ]
        taken = []
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

    def record_start(self, state: RunState, info: RunInfo) -> None:
        """The loop begins: what trains, and how far it is to go. From here on the launch's configuration is the run's."""
        for file in (self.directory.config_file, self.directory.launch_file):
            with suppress(FileNotFoundError):
                self.directory.next_of(file).replace(file)
        self.events.append(
            "state",
            step=state.step,
            state="running",
            max_steps=state.max_steps,
            family=info.family,
            strategy=info.strategy,
            parameters=info.parameters,
            trainable=info.trainable,
            effective_batch=info.effective_batch,
            plugins=info.plugins,
        )

    def record_step(self, state: RunState, result: StepResult) -> None:
        """One step, without what is not known. `max_steps` is in every line: the last one alone tells how far the run is."""
        known = {name: value for name, value in asdict(result).items() if value is not None}
        self.events.append("step", max_steps=state.max_steps, epoch=state.epoch, **known)

    def record_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.events.append("metric", step=step, metrics=metrics)

    def record_validation(self, result: ValidationResult) -> None:
        """Pictures, by their paths in the run directory."""
        images = [{"prompt": image.prompt, "seed": image.seed, "path": self._inside(image.path)} for image in result.images]
        self.events.append("sample", step=result.step, grid=self._inside(result.grid), images=images)

    def record_evaluation(self, result: EvaluationResult) -> None:
        """The loss on held-out pictures, in all and by timestep."""
        fields = {name: value for name, value in asdict(result).items() if name != "step"}
        self.events.append("eval", step=result.step, **fields)

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.events.append(
            "checkpoint",
            step=checkpoint.step,
            path=self._inside(checkpoint.path),
            size=checkpoint.size,
            seconds=checkpoint.seconds,
            blocked=checkpoint.blocked,
        )

    def record_warning(self, state: RunState, message: str, error: Exception | None = None) -> None:
        """Something that the run goes on without; with the traceback, unless the user or the system is to blame for it."""
        known = error is None or isinstance(error, UserError | OSError)
        trace = {} if known else {"traceback": "".join(traceback.format_exception(error))}
        self.events.append("warning", step=state.step, message=message, **trace)

    def record_error(self, state: RunState, error: BaseException) -> None:
        """An exception that is leaving the loop, with its traceback."""
        self._error = error
        trace = "".join(traceback.format_exception(error))
        self.events.append("error", step=state.step, error=type(error).__name__, message=str(error), traceback=trace)

    def record_end(self, state: RunState, outcome: Outcome | None) -> None:
        """The last word; None is for the end by an exception. Nothing may be recorded after it."""
        if outcome is not None:
            condition, message, code = _condition(outcome.reason), outcome.message, outcome.exit_code
        else:
            condition = "failed"
            message = f"{type(self._error).__name__}: {self._error}" if self._error else "an exception ended it"
            code = self._error.exit_code if isinstance(self._error, UserError) else ExitCode.FAILED
        self.events.append("state", step=state.step, state=condition, message=message, exit_code=code)

    def _inside(self, path: Path) -> Path:
        """Relative to the run directory where it lies there, so that the directory can be moved or mounted elsewhere."""
        root, path = self.directory.path.absolute(), path.absolute()
        return path.relative_to(root) if path.is_relative_to(root) else path

    # --- the heartbeat ----------------------------------------------------------------------------------------------

    def _keep_beating(self) -> None:
        failing = False
        while not self._closing.wait(BEAT_SECONDS) and not self._usurper:
            try:
                self._beat()
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("%s: no heartbeat: %s", self.directory.heartbeat_file, error)
                failing = True

    def _beat(self) -> None:
        """One sign of life; a run that was silent for long may find that another one took its place."""
        heartbeat = self.directory.heartbeat()
        if heartbeat is None:
            _write_heartbeat(self.directory, self.record)
        elif self._holds(heartbeat):
            os.utime(self.directory.heartbeat_file)
        else:
            self._usurper = heartbeat
            _log.error("%s took over %s; this run stops", heartbeat.process, self.directory.path)

    def _holds(self, heartbeat: Heartbeat | None) -> bool:
        return heartbeat is not None and (heartbeat.process, heartbeat.started) == (self.record.process, self.record.started)


def _condition(reason: StopReason) -> Condition:
    if reason is StopReason.COMPLETED:
        return "finished"
    return "stopped" if reason in (StopReason.REQUESTED, StopReason.PREEMPTED, StopReason.INTERRUPTED) else "failed"


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


# --- who may be the run ---------------------------------------------------------------------------------------------


def _refuse_foreign_files(directory: RunDirectory) -> None:
    taken = [name for name in _OWN_FILES if (directory.path / name).exists()]
    if directory.control.is_dir() and any(directory.control.iterdir()):
        taken.append("control/")
    if taken:
        raise UserError(
            f"{directory.path} is no run directory, but has {', '.join(taken)}, which a run would overwrite",
            fix="choose another --output_dir, or move these away",
        )


def _dead_heartbeat(directory: RunDirectory) -> Heartbeat | None:
    """The heartbeat of a run that died here, None if there is none. UserError when the run lives."""
    first = directory.heartbeat()
    if first is None:
        return None
    waiting = False
    while (heartbeat := directory.heartbeat()) is not None:
        alive = heartbeat.process.alive() if heartbeat.process else None
        if alive is False or (alive is None and heartbeat.age > STALE_SECONDS):
            return heartbeat
        if alive or heartbeat.touched != first.touched:
            raise _in_use(directory, heartbeat)
        if not waiting:
            _log.warning("%s: waiting to see whether %s still lives", directory.path, heartbeat.process or "its run")
        waiting = True
        time.sleep(POLL_SECONDS)
    return None


def _clear_away(directory: RunDirectory, dead: Heartbeat) -> None:
    """Remove the heartbeat of a dead run; one process at a time, lest a slow one remove what a quick one put in its place."""
    turn = directory.path / ".takeover"
    try:
        turn.touch(exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"another process is taking over {directory.path} from a run that died",
            fix=f"choose another --output_dir; if there is no such process, remove {turn}",
        ) from None
    try:
        if directory.heartbeat() == dead:
            directory.heartbeat_file.unlink(missing_ok=True)
    finally:
        turn.unlink()


def _write_heartbeat(directory: RunDirectory, record: RunRecord) -> None:
    """Take hold of the directory; FileExistsError when somebody else has."""
    assert record.process is not None
    content = json.dumps({"process": asdict(record.process), "started": record.started})
    with directory.heartbeat_file.open("x", encoding="utf-8") as file:
        file.write(content)


def _write_record(directory: RunDirectory, record: RunRecord) -> None:
    content = {"kind": RUN_KIND, "schema": SCHEMA, **asdict(record)}
    atomic_write(directory.record_file, json.dumps(content, indent=2).encode() + b"\n")


def _in_use(directory: RunDirectory, heartbeat: Heartbeat | None) -> UserError:
    who = str(heartbeat.process) if heartbeat and heartbeat.process else "another process"
    if heartbeat and heartbeat.age > STALE_SECONDS:
        who += f", though without a sign of life for {heartbeat.age:.0f} s"
        remedy = "end that process"
    else:
        remedy = f"stop it with `smalti run stop {directory.path}`"
    return UserError(f"{directory.path} is in use: a run lives there, {who}", fix=f"{remedy}, or choose another --output_dir")
