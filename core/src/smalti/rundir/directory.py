"""The run directory: the only thing that a run and its observers share.

    run.json               the record of the run; replaced atomically
    config.toml            the resolved configuration; with launch.json and accelerate.yaml, how the run was started
    *.next.toml, .json     those of a launch that has not begun to train; they replace the others when it does
    events.jsonl           what happened, see `smalti.rundir.events`; events.node-K.jsonl is the health of node K
    circuit.node-K.json    the faults of accelerators that ended the run on node K
    hangs/                 stacks of ranks that made no progress
    heartbeat              the processes of the run, from the start of a launch on; touched every few seconds
    control/*.json         requests to the run
    samples/STEP/          the images of a validation, and a contact sheet of them if a plugin writes one
    checkpoints/, data/    the state of the run, indexes of its datasets
    evaluations/           the losses of held-out images, if a plugin evaluates
    nodes/node-K.json      what node K has said before its ranks started, where several share the directory
    nodes/preflight.json   the last report of how these nodes compare
    downloads/             checkpoints from URLs that the run resumed from
    loss.png               a plot of the loss, if a plugin writes one

There are no locks, so any file system works. Each file has one writer, except the events of a launch of several processes: its
launcher writes them until the main rank does, on the same node, and each rank there adds its faults. The status of a run is not
stored: it is derived from the last state in the events, from the processes and from the heartbeat (`smalti.rundir.heartbeat`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import Field, TypeAdapter, ValidationError

from smalti.errors import ExitCode, UserError
from smalti.rundir.events import Event, complete_size, read_events, read_events_backwards, seconds_for
from smalti.rundir.heartbeat import DOUBT_SECONDS, Heartbeat, HeartbeatWatch
from smalti.rundir.phases import Phase
from smalti.system import Process, atomic_write, load_json, read_regular

SCHEMA = 1
POLL_SECONDS = 0.25
CONTACT_SHEET = "grid.png"
"""The file beside the images of a validation that shows all of them. A plugin may write it."""

Condition = Literal["never started", "running", "stale", "stopped", "finished", "failed"]
RequestKind = Literal["stop", "save", "sample"]
ENDINGS: tuple[Condition, ...] = ("stopped", "finished", "failed")
REFUSED = "refused"
"""The state of a launch that failed before its first step, of a run that has made steps. It does not change the status."""

RUN_KIND = "smalti-run"
RESTARTING = "restarting"
"""The state between two generations of a group of nodes: the run goes on."""
_Time = Annotated[float, Field(ge=0, lt=1e11)]  # that calendars have
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json. `started` and `process` are of the latest attempt, None before the first.

    `training_since` is when its loop began, None until then. `mixed_precision` is the choice of node 0. Times are unix seconds.
    """

    id: str
    name: str
    created: _Time
    config_digest: str
    world_size: int
    started: _Time | None = None
    process: Process | None = None
    mixed_precision: str | None = None
    training_since: _Time | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run at this moment. `exit_code` is that of the run, once it has ended."""

    condition: Condition
    message: str
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.condition in ENDINGS


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a run. The answer is a `control_ack` event after byte `asked_at` of the events file."""

    id: str
    kind: str
    details: Mapping[str, object] = field(default_factory=dict)
    asked_at: int = 0

    @property
    def sent(self) -> float:
        """When it was made, in unix seconds, by the clock of whoever made it; 0 if unknown."""
        digits = self.id.partition("-")[0]
        return int(digits) / 1e9 if digits.isdigit() else 0.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in one row. Values that are not known yet are None. `updated` is the time of its last event.

    `phase` is the phase of a running run. Loss and speed are smoothed (`smalti.rundir.events`).
    """

    path: Path
    record: RunRecord
    status: Status
    step: int
    max_steps: int | None
    loss: float | None
    samples_per_second: float | None
    seconds_remaining: float | None
    updated: float | None
    phase: Phase | None = None


_RECORD = TypeAdapter(RunRecord)
_HEARTBEAT = TypeAdapter(Heartbeat)


class RunDirectory:
    """A run as an observer sees it. `smalti.rundir.writer` is the side of the run itself."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.record_file = self.path / "run.json"
        self.config_file = self.path / "config.toml"
        self.launch_file = self.path / "launch.json"
        self.accelerate_file = self.path / "accelerate.yaml"
        self.events_file = self.path / "events.jsonl"
        self.heartbeat_file = self.path / "heartbeat"
        self.control = self.path / "control"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.data = self.path / "data"
        self.loss_plot = self.path / "loss.png"
        self.heartbeat_watch = HeartbeatWatch()

    @classmethod
    def containing(cls, path: Path) -> RunDirectory | None:
        """The launched run that `path` is the directory of, or a checkpoint in; None for any other folder."""
        places = [path, path.resolve().parent.parent]
        return next((run for place in places if (run := cls(place)).launch_file.is_file()), None)

    def relative(self, path: Path) -> Path:
        """`path` relative to the run directory if it is inside, so that the directory can be moved or mounted elsewhere."""
        root, path = self.path.absolute(), path.absolute()
        return path.relative_to(root) if path.is_relative_to(root) else path

    def next_of(self, file: Path) -> Path:
        """Where a launch of a run that has made steps writes config.toml or launch.json until training begins."""
        return file.with_name(f"{file.stem}.next{file.suffix}")

    def samples_at(self, step: int) -> Path:
        return self.samples / f"{step:08d}"

    def node_events_file(self, node: int) -> Path:
        """The events file of node `node`. That of node 0 is `events_file`."""
        return self.path / f"events.node-{node}.jsonl"

    def event_files(self) -> list[Path]:
        """All existing events files, `events_file` first."""
        return [path for path in [self.events_file, *sorted(self.path.glob("events.node-*.jsonl"))] if path.exists()]

    # --- watching ---------------------------------------------------------------------------------------------------

    def record(self) -> RunRecord | None:
        """The content of run.json; None if there is none, or one of another program. Raises UserError if it cannot be used."""
        try:
            content: object = load_json(read_regular(self.record_file))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(error) from error
        if not isinstance(content, dict) or content.get("kind") != RUN_KIND:
            return None
        if (schema := content.get("schema")) != SCHEMA:
            raise UserError(
                f"{self.record_file} has schema {schema}; this version of smalti reads schema {SCHEMA}", fix="update smalti"
            )
        try:
            return _RECORD.validate_python(content)
        except ValidationError as error:
            raise self._damaged(error) from error

    def heartbeat(self) -> Heartbeat | None:
        """The heartbeat; None if the run ended cleanly or was never started."""
        try:
            content = read_regular(self.heartbeat_file)
            touched = self.heartbeat_file.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            return _HEARTBEAT.validate_python({**load_json(content), "touched": touched})
        except (ValueError, TypeError):
            return Heartbeat(process=None, started=touched, touched=touched)

    def watch_heartbeat(self) -> Heartbeat | None:
        """The heartbeat. What `heartbeat_watch` says is about all calls of this and of `status`."""
        return self.heartbeat_watch.look(self.heartbeat)

    def status(self) -> Status:
        """The status, from the last state in the events, the processes and the heartbeat.

        At first nothing is known about a process on another node but that its heartbeat is there: it counts as running.
        """
        record, heartbeat = self.record(), self.watch_heartbeat()
        if record is None:
            return Status(condition="never started", message="not a run directory")
        started = heartbeat.started if heartbeat else record.started
        if started is None:
            return Status(condition="never started", message="prepared, but not started yet")
        # No step follows a final state. Before the first step, the last state may be of an earlier attempt.
        last = next((event for event in read_events_backwards(self.events_file) if _is_status(event)), None)
        if last and _is_of(last, started) and (ended := _final_status(last)):
            return ended
        if heartbeat is None:
            return Status(condition="failed", message="ended without reporting why", exit_code=ExitCode.KILLED)
        who = heartbeat.process or "an unknown process"
        if heartbeat.alive() is False:
            return Status(condition="failed", message=f"{who} died without reporting why", exit_code=ExitCode.KILLED)
        if self.heartbeat_watch.stale:
            return Status(condition="stale", message=f"no heartbeat for {self.heartbeat_watch.age:.0f} s from {who}")
        return Status(condition="running", message=str(who))

    def events(self, *, follow: bool = False, offset: int = 0) -> Iterator[Event]:
        """The events of the run from byte `offset` on: 0, or the `end` of an earlier event.

        With `follow`, waits for more and returns once the run has ended (a stale one has not).
        """
        while True:
            complete = not follow or self.status().ended
            for event in read_events(self.events_file, offset):
                offset = event.end
                yield event
            if complete:
                return
            time.sleep(POLL_SECONDS)

    def latest(self, *kinds: str) -> Event | None:
        """The last event of one of these kinds. Reads from the end of the file, so a long history costs nothing."""
        return next((event for event in read_events_backwards(self.events_file) if event.kind in kinds), None)

    def recent_steps(self, count: int = 32) -> list[Event]:
        """The last step events of the latest attempt, oldest first."""
        attempt = takewhile(lambda event: event.text("state") != "starting", read_events_backwards(self.events_file))
        return list(islice((event for event in attempt if event.kind == "step"), count))[::-1]

    def phase(self) -> Phase | None:
        """The last phase that the latest attempt reported; None if it reported none, or has made a step since."""
        last = self.latest("phase", "step", "state")
        return phase_of(last) if last and last.kind == "phase" else None

    def summary(self) -> Summary | None:
        """The run in one row; None if this is not a run directory."""
        if (record := self.record()) is None:
            return None
        status, last, of_attempt = self.status(), self.latest("step"), self.recent_steps(1)
        newest = next(read_events_backwards(self.events_file), None)
        step, max_steps = (last.step or 0, last.number("max_steps")) if last else (0, None)
        phase = self.phase() if status.condition == "running" else None
        samples_per_second, remaining = None, phase.seconds_remaining(newest.time) if phase and newest else None
        if of_attempt and last:
            samples_per_second = last.number("recent_samples_per_second")
            if max_steps and status.condition == "running":
                remaining = seconds_for(int(max_steps) - step, last.number("samples") or 0.0, samples_per_second)
        return Summary(
            path=self.path,
            record=record,
            status=status,
            step=step,
            max_steps=int(max_steps) if max_steps else None,
            loss=shown_loss(last) if last else None,
            samples_per_second=samples_per_second,
            seconds_remaining=remaining,
            updated=newest.time if newest else None,
            phase=phase,
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(self, kind: RequestKind, **details: object) -> Request:
        """Send a request to the run. It checks for requests between two steps, and before the first one all the time.

        Raises UserError if the run is not running.
        """
        status = self.status()
        if status.condition == "never started" or status.ended:
            raise UserError(
                f"{self.path}: no running process to {kind}: {status.condition} ({status.message})",
                fix="`smalti run ls` lists runs and their status",
            )
        request = Request(
            id=f"{time.time_ns()}-{uuid4().hex[:8]}", kind=kind, details=details, asked_at=complete_size(self.events_file)
        )
        content = {"kind": kind, "details": details, "t": time.time(), "from": str(Process.current())}
        try:
            self.control.mkdir(exist_ok=True)
            atomic_write(self.control / f"{request.id}.json", json.dumps(content).encode())
        except OSError as error:
            raise UserError(
                f"cannot write to {self.control}: {error.strerror or error}", fix="ask as the user who started the run"
            ) from error
        return request

    def answer(self, request: Request, timeout: float) -> Event | None:
        """Wait for the answer of the run: a `control_ack` event with `accepted` and `message`. None if none comes in time."""
        deadline, offset = time.monotonic() + timeout, request.asked_at
        while True:
            final = self.status().ended or time.monotonic() > deadline
            for event in read_events(self.events_file, offset):
                offset = event.end
                if event.kind == "control_ack" and event.text("request") == request.id:
                    return event
            if final:
                return None
            time.sleep(POLL_SECONDS)

    def _damaged(self, error: ValueError) -> UserError:
        return UserError(f"{self.record_file} is damaged: {error}", fix="choose another --output_dir")


def watch_doubtful(directories: Sequence[RunDirectory]) -> None:
    """Watch heartbeats that look too old or too new by this node's clock until they change, at most `DOUBT_SECONDS` in all.

    For commands that look once. Costs nothing if clocks agree and all runs live or have ended.
    """
    deadline = time.monotonic() + DOUBT_SECONDS + POLL_SECONDS
    waiting = list(directories)
    while waiting and time.monotonic() < deadline:
        waiting = [each for each in waiting if not each.status().ended and each.heartbeat_watch.in_doubt]
        if waiting:
            time.sleep(POLL_SECONDS)


def overview(samples: Path) -> Path:
    """The file that shows the images of a validation: the contact sheet in their folder, or the folder if there is none."""
    sheet = samples / CONTACT_SHEET
    return sheet if sheet.is_file() else samples


def find_runs(root: Path, depth: int = 4) -> Iterator[RunDirectory]:
    """The runs at `root` and up to `depth` folders below it, by name. Folders inside a run are not searched."""
    try:
        if (run := RunDirectory(root)).record() is not None:
            if pipes := [file for file in (run.heartbeat_file, run.events_file) if file.exists() and not file.is_file()]:
                raise OSError(f"{pipes[0]} is not a regular file")
            yield run
            return
        with os.scandir(root) as entries:
            folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (UserError, OSError) as error:
        _log.warning("skipped: %s", error)
        return
    if depth > 0:
        for name in folders:
            if not name.startswith("."):
                yield from find_runs(root / name, depth - 1)


def shown_loss(step: Event) -> float | None:
    """The smoothed loss of a step event; the loss of the step in events of versions that did not write the former."""
    smoothed = step.number("smoothed_loss")
    return step.number("loss") if smoothed is None else smoothed


def phase_of(event: Event) -> Phase:
    """The content of an event of the kind "phase"."""
    done, total, begun = event.number("done"), event.number("total"), event.number("begun")
    return Phase(
        name=event.text("phase"),
        begun=event.time if begun is None else begun,
        done=None if done is None else int(done),
        total=None if total is None else int(total),
        unit=event.text("unit"),
    )


def _is_status(event: Event) -> bool:
    """Whether an event changes the status: not those of a launch that was refused, or that is only starting."""
    return event.kind == "step" or (event.kind == "state" and event.text("state") not in (REFUSED, "starting"))


def _is_of(event: Event, started: float) -> bool:
    """Whether a state is that of the attempt that has begun at `started`. By the clock for events of earlier versions."""
    attempt = event.number("attempt")
    return event.time >= started if attempt is None else attempt == started


def _final_status(event: Event) -> Status | None:
    """The status of a run whose last state is this event; None if the state is not final."""
    code = event.number("exit_code")
    for condition in ENDINGS:
        if event.text("state") == condition:
            return Status(condition=condition, message=event.text("message"), exit_code=None if code is None else int(code))
    return None
