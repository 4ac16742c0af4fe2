"""Runs that the page has started: one file for each in the user's data folder. They continue when the server ends."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from smalti import ExitCode, UserError
from smalti.rundir import RunDirectory
from smalti.system import Process, atomic_write, open_regular, read_regular
from smalti_webui.server.settings import Settings

State = Literal["waiting", "starting", "running", "ended"]
_ID = re.compile(r"\d{1,20}-[0-9a-f]{8}")
_END = re.compile(r"smalti: (?P<kind>done|error|ended with exit code (?P<code>\d+)): (?P<message>.*)")
_STOPPED = (ExitCode.PREEMPTED, ExitCode.STOPPED, ExitCode.INTERRUPTED)
_TAIL = 20_000
_LINES = 40
_KEPT = 200


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be launched. `config` is a copy of the configuration, which later edits of the draft do not change.

    `folder` is where relative paths start. `gpus` is the number of GPUs of this node that it needs, 0 for its processors.
    """

    id: str
    name: str
    config: Path
    folder: Path
    output_dir: Path | None
    gpus: int
    draft: str = ""
    asked: float = 0.0

    @property
    def command(self) -> list[str]:
        """The arguments of `smalti`."""
        return ["train", str(self.config)]

    @property
    def shell(self) -> str:
        """The same for a shell."""
        return f"cd {shlex.quote(str(self.folder))} && {shlex.join(['smalti', *self.command])}"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A request that was started. `devices` are the GPUs that it got."""

    request: Request
    process: Process
    started: float
    devices: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.request.id


_REQUEST = TypeAdapter(Request)
_LAUNCH = TypeAdapter(Launch)


class Store:
    """The files of all launches: `launches/ID/` with the configuration, the log, and `launch.json` once it was started."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.data / "launches"

    def new(self, *, name: str, text: str, folder: Path, output_dir: Path | None, gpus: int, draft: str = "") -> Request:
        """Keep a configuration to be launched. `text` is TOML."""
        now = time.time()
        identity = f"{int(now * 1000)}-{uuid4().hex[:8]}"
        place = self.folder / identity
        place.mkdir(parents=True, mode=0o700)
        config = place / "config.toml"
        atomic_write(config, text.encode(), mode=0o600)
        return Request(
            id=identity, name=name, config=config, folder=folder, output_dir=output_dir, gpus=gpus, draft=draft, asked=now
        )

    def log(self, identity: str) -> Path:
        return self._place(identity) / "train.log"

    def write(self, launch: Launch) -> None:
        """Keep what was started."""
        atomic_write(self._place(launch.id) / "launch.json", _LAUNCH.dump_json(launch, indent=2))

    def find(self, identity: str) -> Launch:
        """Raises UserError if there is none."""
        try:
            return _LAUNCH.validate_json(read_regular(self._place(identity) / "launch.json"))
        except FileNotFoundError:
            raise UserError(f"there is no launch {identity}", fix="the list of runs has all runs") from None
        except ValidationError as error:
            raise UserError(f"the record of launch {identity} cannot be read: {error.errors()[0]['msg']}") from None

    def all(self) -> list[Launch]:
        """All launches, the newest first. Those that cannot be read are left out."""
        found = []
        for path in sorted(self.folder.glob("*/launch.json"), reverse=True)[:_KEPT]:
            try:
                found.append(_LAUNCH.validate_json(read_regular(path)))
            except (ValidationError, OSError):
                continue
        return found

    def active(self) -> list[Launch]:
        """Those whose process is alive."""
        return [launch for launch in self.all() if launch.process.alive()]

    def was_started(self, identity: str) -> bool:
        return (self._place(identity) / "launch.json").exists()

    def discard(self, request: Request) -> None:
        """Remove a request that was never started: a copy of a configuration."""
        if not self.was_started(request.id):
            shutil.rmtree(self._place(request.id), ignore_errors=True)

    def _place(self, identity: str) -> Path:
        if _ID.fullmatch(identity) is None:
            raise UserError(f"{identity!r} cannot be a launch", fix="the list of runs has all runs")
        return self.folder / identity


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a launch is. `run_id` is that of its run directory once it has begun; `lines` are the last ones of its log."""

    state: State
    run_id: str = ""
    lines: tuple[str, ...] = ()
    ended: str = ""
    failed: bool = False


def progress_of(store: Store, launch: Launch) -> Progress:
    """Look at the process, the run directory and the log of a launch."""
    lines, run_id = tail(store.log(launch.id)), _run_id_of(launch)
    if launch.process.alive():
        return Progress(state="running" if run_id else "starting", run_id=run_id, lines=lines)
    message, failed = end_of(lines)
    return Progress(state="ended", run_id=run_id, lines=lines, ended=message, failed=failed)


def end_of(lines: Sequence[str]) -> tuple[str, bool]:
    """How a launch has ended by the last lines of its log, and whether it has failed.

    The run directory may have been used by another launch since.
    """
    for line in reversed(lines):
        if match := _END.match(line):
            code = match["code"]
            return match["message"] or line, match["kind"] == "error" or (code is not None and int(code) not in _STOPPED)
    return "it ended without a message", True


def _run_id_of(launch: Launch) -> str:
    """The id of the run that this launch has started; empty if it has not begun."""
    if launch.request.output_dir is None:
        return ""
    try:
        record = RunDirectory(launch.request.output_dir).record()
    except (UserError, OSError):
        return ""
    begun = record is not None and record.started is not None and record.started >= launch.started - 1
    return record.id if begun and record is not None else ""


def tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log. Of a line that was overwritten on a terminal, its last state."""
    try:
        with open_regular(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip("\r").rpartition("\r")[2] for line in text.splitlines()[-_LINES:])


def as_json(request: Request) -> bytes:
    """A request for a file."""
    return _REQUEST.dump_json(request, indent=2)


def from_json(content: bytes) -> Request:
    """The inverse. Raises ValueError for anything else."""
    return _REQUEST.validate_json(content)
