"""Requests to runs from the page: the same functions as `smalti run stop`, `save` and `sample`, and a second Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from smalti import UserError
from smalti.rundir import RequestKind, RunDirectory
from smalti.system import load_json, read_regular
from smalti_webui.launch.launches import Store
from smalti_webui.runs.index import FoundRun
from smalti_webui.server.messages import Level
from smalti_webui.server.processes import start_detached
from smalti_webui.server.settings import Settings

ANSWER_SECONDS = 2.0
"""How long the page waits for an answer. A later one arrives with the events."""
_SIGNALS_APART = 0.5


async def ask(directory: RunDirectory, kind: RequestKind) -> tuple[str, Level]:
    """Send a request, and say what the run has answered. Raises UserError if the run is not running."""
    request = await asyncio.to_thread(directory.request, kind)
    answer = await asyncio.to_thread(directory.answer, request, ANSWER_SECONDS)
    if answer is None:
        return f"Requested to {kind}. The run answers after its step.", "info"
    if answer.fields.get("accepted") is not True:
        return f"Refused: {answer.text('message')}", "error"
    return f"Accepted: {answer.text('message')}", "success"


def stop_now(directory: RunDirectory) -> None:
    """Do what a second Ctrl-C does: the run ends without another checkpoint.

    Raises UserError if it is not a process of this node.
    """
    heartbeat = directory.heartbeat()
    if heartbeat is None or heartbeat.process is None or heartbeat.alive() is False:
        raise UserError(f"{directory.path}: no running process to stop", fix="`smalti run ls` lists runs and their status")
    process = heartbeat.process if heartbeat.process.alive() else heartbeat.worker
    if process is None or not process.alive():
        where = f"{heartbeat.process} is not a process of this node"
        raise UserError(where, fix=f"press Ctrl-C twice there, or stop after the step: smalti run stop {directory.path}")
    for _ in range(2):
        if process.alive():
            try:
                os.kill(process.pid, signal.SIGINT)
            except OSError as error:
                raise UserError(
                    f"{process} cannot be stopped: {error.strerror}", fix="ask as the user who started it"
                ) from None
            time.sleep(_SIGNALS_APART)


def resume_problem(run: FoundRun) -> str:
    """Why the page cannot resume a run; "" if it can."""
    values = launched_values(run.directory)
    machines = values.get("num_machines")
    if isinstance(machines, int) and machines > 1:
        return f"the run uses {machines} nodes; start `smalti train` on each of them"
    if not run.directory.config_file.is_file():
        return "the run has no config.toml"
    return "" if _folder(run, values) else "its relative paths start at another folder; resume it in a shell there"


def resume(run: FoundRun, settings: Settings, *flags: str) -> int:
    """Start `smalti train` with the configuration of the run, which continues when the server ends. Returns its process id.

    Raises UserError if the run is running or cannot be resumed from here.
    """
    status = run.directory.status()
    if status.condition in ("running", "stale"):
        raise UserError(f"{run.path} is {status.condition} ({status.message})", fix="stop it first")
    if problem := resume_problem(run):
        raise UserError(problem, fix=f"smalti train {run.directory.config_file}")
    folder = _folder(run, launched_values(run.directory))
    assert folder is not None
    return start_detached(["train", str(run.directory.config_file), *flags], resume_log(run, settings), folder)


def resume_log(run: FoundRun, settings: Settings) -> Path:
    """Where the output of a run goes that was resumed from the page."""
    return settings.data / "logs" / f"{run.id}.log"


def console_log(run: FoundRun, settings: Settings) -> Path | None:
    """The output of the latest launch of a run by the page; None if the page has not launched it."""
    store = Store(settings)
    launched = [store.log(launch.id) for launch in store.all() if _is(launch.request.output_dir, run.path)]
    found = [path for path in (resume_log(run, settings), *launched) if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _is(path: Path | None, other: Path) -> bool:
    return path is not None and path.resolve() == other.resolve()


def launched_values(directory: RunDirectory) -> dict[str, object]:
    """The values of all options of the latest launch; empty if launch.json cannot be read."""
    try:
        found = load_json(read_regular(directory.launch_file))
    except (OSError, ValueError):
        return {}
    values = found.get("values") if isinstance(found, dict) else None
    return values if isinstance(values, dict) else {}


def _folder(run: FoundRun, values: dict[str, object]) -> Path | None:
    """The folder in which relative paths of the configuration start; None if that is not known."""
    output = values.get("output_dir")
    if not isinstance(output, str):
        return None
    given = Path(output)
    if given.is_absolute():
        return Path.cwd() if given.resolve() == run.path.resolve() else None
    parts = [part for part in given.parts if part != "."]
    matches = ".." not in parts and list(run.path.parts[-len(parts) :]) == parts
    return Path(*run.path.parts[: -len(parts)]) if matches else None
