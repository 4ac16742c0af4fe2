"""`smalti run`: list, watch and control runs. Only reads run directories and writes requests. Imports no torch."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import cast

import click

from smalti.builtin import LINE_SECONDS, Display, PhaseProgress, Progress, open_display, speed
from smalti.cli.output import print_table
from smalti.cli.pages.help import Group
from smalti.errors import ExitCode, UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins import load_plugins, selection_of
from smalti.rundir import (
    POLL_SECONDS,
    Event,
    Phase,
    RequestKind,
    RunDirectory,
    Status,
    Summary,
    find_runs,
    phase_of,
    read_events,
    to_json,
    watch_doubtful,
)
from smalti.system import duration
from smalti.types import RunValue, StepResult

_DIRECTORY = click.argument("directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
_TITLES = ("run", "status", "step", "smoothed loss", "samples/s", "eta", "age")
_COLOURS = {"running": "green", "stale": "yellow", "failed": "red", "finished": "blue"}


@click.group(cls=Group, examples=("smalti run ls runs", "smalti run watch runs/first", "smalti run stop runs/first"))
def run() -> None:
    """List, watch and control runs."""


# --- ls -------------------------------------------------------------------------------------------------------------


@run.command(examples=("smalti run ls", "smalti run ls /data/runs --depth=2 --json"))
@click.argument("roots", metavar="[ROOT]...", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--depth", default=4, show_default=True, help="Folder levels to search below each ROOT.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(roots: tuple[Path, ...], depth: int, as_json: bool) -> None:
    """List runs and their status.

    Searches below each ROOT, or below the current folder. As on the console, the loss is the mean of about 20 steps, and
    samples/s the speed of about the last minute. Plugins add columns, such as goodput: the share of the time
    that was spent on steps that were kept.
    """
    runs = [directory for root in roots or (Path(),) for directory in find_runs(root, depth)]
    watch_doubtful(runs)
    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    summaries = [
        (summary, plugins.gather(HookSpecs.describe_run, directory))
        for directory in runs
        if (summary := directory.summary()) is not None
    ]
    if as_json:
        rows = [{**asdict(summary), **{each.name: each.value for each in more}} for summary, more in summaries]
        click.echo(to_json(rows, indent=2))
    elif summaries:
        titles = (*_TITLES, *(each.name for each in summaries[0][1]), "")
        print_table(titles, [_row(*each) for each in summaries], right=range(2, len(titles) - 1), colours=_COLOURS)
    else:
        click.echo(f"no runs found below {', '.join(str(root) for root in roots) or 'the current folder'}", err=True)


def _row(summary: Summary, more: Sequence[RunValue]) -> tuple[str, ...]:
    record = summary.record
    since = record.started or record.created
    return (
        str(summary.path),
        summary.status.condition,
        f"{summary.step}/{summary.max_steps or '-'}",
        "-" if summary.loss is None else f"{summary.loss:.4g}",
        speed(summary.samples_per_second),
        duration(summary.seconds_remaining),
        duration(time.time() - since),
        *(each.text for each in more),
        _phase_text(summary.phase) if summary.status.condition == "running" else summary.status.message,
    )


def _phase_text(phase: Phase | None) -> str:
    """The phase of a run, unless it is training."""
    return "" if phase is None or phase.name == "training" else str(phase)


# --- watch ----------------------------------------------------------------------------------------------------------


@run.command(examples=("smalti run watch runs/first", "smalti run watch runs/first --json > events.jsonl"))
@_DIRECTORY
@click.option(
    "--interval", default=LINE_SECONDS, show_default=True, help="Seconds between lines, if the output is not a terminal."
)
@click.option("--patience", default=600.0, show_default=True, help="Give up after this many seconds without a heartbeat.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON, one per line.")
@click.option("--offset", default=0, help="Start at this byte of events.jsonl. Only with --json.")
@click.pass_context
def watch(context: click.Context, directory: Path, interval: float, patience: float, as_json: bool, offset: int) -> None:
    """Follow a run until it ends, then exit with its exit code. Ctrl-C does not stop the run."""
    watched = RunDirectory(directory)
    if watched.record() is None:
        _expect_run(directory, patience)
    try:
        if as_json:
            status = _pass_through(watched, offset, patience)
        else:
            status = _show(watched, open_display(sys.stdout, interval), patience)
    except KeyboardInterrupt:
        click.echo(f"stopped watching; the run continues. To stop it: smalti run stop {directory}", err=True)
        context.exit(ExitCode.INTERRUPTED)
    click.echo(f"{directory}: {status.condition}: {status.message}", err=True)
    context.exit(ExitCode.FAILED if status.exit_code is None else status.exit_code)


def _expect_run(directory: Path, patience: float) -> None:
    """Say that a run is waited for, and which ones there are. Raises UserError for a folder that holds other things."""
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory} is not a run directory", fix="`smalti run ls` lists runs and their status")
    there = ", ".join(str(each.path) for each in islice(find_runs(Path(), 2), 5)) or "none"
    click.echo(f"{directory}: no run there yet; waiting {patience:g} s, Ctrl-C ends; runs here: {there}", err=True)


def _pass_through(watched: RunDirectory, offset: int, patience: float) -> Status:
    status = watched.status()
    for item in _follow(watched, offset, patience):
        if isinstance(item, Status):
            status = item
        else:
            click.echo(item.to_json())
    return status


def _show(watched: RunDirectory, display: Display, patience: float) -> Status:
    """Show the current state of the run, then its events as they come."""
    recent, status = watched.recent_steps(), watched.status()
    watcher = Watcher(watched, display)
    for event in recent:
        watcher.take_step(event)
    begun = watched.latest("state")
    offset = recent[-1].end if recent else begun.offset if begun else 0
    try:
        if watcher.progress:
            display.update(watcher.progress)
        for item in _follow(watched, offset, patience):
            if not isinstance(item, Status):
                watcher.show(item)
                continue
            status = item
            if not status.ended:
                display.print(f"{status.condition}: {status.message}")
    finally:
        display.close()
    return status


def _follow(watched: RunDirectory, offset: int, patience: float) -> Iterator[Event | Status]:
    """The events of all nodes as they come, and the status when it changes. Returns when the run has ended or is silent."""
    offsets = {watched.events_file: offset}
    shown = ""
    while True:
        status = watched.status()
        for path in watched.event_files():
            for event in read_events(path, offsets.get(path, 0)):
                offsets[path] = event.end
                yield event
        if status.condition != shown:
            shown = status.condition
            yield status
        if status.ended or watched.heartbeat_watch.age > patience:
            return
        time.sleep(POLL_SECONDS)


def _result(event: Event) -> StepResult:
    """The step of a step event. What another version has not written is not a number, or not known."""
    loss, norm, rate, samples, seconds = map(event.number, ("loss", "grad_norm", "learning_rate", "samples", "seconds"))
    return StepResult(
        step=event.step or 0,
        loss=math.nan if loss is None else loss,
        grad_norm=math.nan if norm is None else norm,
        learning_rate=rate or 0.0,
        samples=int(samples or 0),
        seconds=seconds or 0.0,
        mfu=event.number("mfu"),
        peak_memory_mb=event.number("peak_memory_mb"),
        smoothed_loss=event.number("smoothed_loss"),
        recent_samples_per_second=event.number("recent_samples_per_second"),
    )


class Watcher:
    """Shows events on a display."""

    def __init__(self, watched: RunDirectory, display: Display) -> None:
        self.progress: Progress | None = None
        self._watched = watched
        self._display = display

    def show(self, event: Event) -> None:
        if event.kind == "step":
            self._display.update(self.take_step(event))
            return
        if event.kind == "phase":
            if event.text("phase") != "training":
                self._display.update(PhaseProgress(phase_of(event), event.time))
            return
        if event.text("state") in ("starting", "restarting"):
            self.progress = None
        if text := self._text(event):
            self._display.print(text)

    def take_step(self, event: Event) -> Progress:
        step, max_steps = event.step or 0, int(event.number("max_steps") or 0)
        if self.progress is None:
            record, begun = self._watched.record(), event.time - (event.number("seconds") or 0.0)
            self.progress = Progress(step=step - 1, max_steps=max_steps, now=begun, started=record.started if record else None)
        self.progress.max_steps = max_steps
        self.progress.update(_result(event), event.time)
        return self.progress

    def _text(self, event: Event) -> str:
        """An event as text; "" for one that is not shown."""
        message = event.text("message")
        match event.kind:
            case "state" if event.text("state") in ("starting", "running", "restarting"):
                return f"{event.text('state')} {message}".rstrip()
            case "checkpoint":
                return f"checkpoint of step {event.step}: {self._watched.path / event.text('path')}"
            case "sample":
                return f"images of step {event.step}: {self._watched.path / (event.text('overview') or event.text('grid'))}"
            case "eval":
                of = "".join(f" times {name}" for name in cast("list[str]", event.fields.get("factors", [])))
                return f"evaluation of step {event.step}: loss {event.number('loss') or 0.0:.4g}{of} on held-out images"
            case "error":
                return f"error: {event.text('error')}: {message}"
            case "control_ack":
                return f"{event.text('kind')} {'accepted' if event.fields.get('accepted') else 'refused'}: {message}"
            case "generation":
                return message
            case "log" | "warning" | "health":
                return f"{event.kind}: {message}"
            case "malformed":
                return f"a line at byte {event.offset} cannot be read: {event.text('line')[:80]!r}"
        return ""


# --- stop, save, sample ---------------------------------------------------------------------------------------------


def _request(directory: Path, kind: RequestKind, timeout: float, *, wait: bool, as_json: bool) -> ExitCode:
    """Send a request, wait for the answer and print it. Fails unless the request is accepted, or `wait` is not set."""
    run_directory = RunDirectory(directory)
    request = run_directory.request(kind)
    answer = run_directory.answer(request, timeout) if wait else None
    accepted = None if answer is None else answer.fields.get("accepted") is True
    if answer is not None:
        message = f"{'' if accepted else 'refused: '}{answer.text('message')}"
    elif not wait:
        message = f"requested to {kind}"
    else:
        status = run_directory.status()
        ended = f"the run has ended ({status.condition})"
        why = ended if status.ended else f"none within {timeout:g} s; runs answer after a step"
        message = f"no answer to the request to {kind}: {why}"
    done = accepted is True or not wait
    if as_json:
        result = {"run": directory, "request": request.id, "kind": kind, "accepted": accepted, "message": message}
        click.echo(to_json(result, indent=2))
    else:
        click.echo(f"{directory}: {message}", err=not done)
    return ExitCode.DONE if done else ExitCode.FAILED


def _add_request(kind: RequestKind, summary: str, *examples: str) -> None:
    @run.command(kind, help=summary, examples=examples)
    @_DIRECTORY
    @click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for the run's answer.")
    @click.option("--no-wait", is_flag=True, help="Do not wait for the answer.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.pass_context
    def command(context: click.Context, directory: Path, timeout: float, no_wait: bool, as_json: bool) -> None:
        context.exit(_request(directory, kind, timeout, wait=not no_wait, as_json=as_json))


_add_request(
    "stop",
    "Ask a run to finish its step, save a checkpoint and stop.",
    "smalti run stop runs/first",
    "smalti run stop runs/first --no-wait",
)
_add_request("save", "Ask a run to save a checkpoint after its step.", "smalti run save runs/first --timeout=300")
_add_request("sample", "Ask a run to generate its validation images after its step.", "smalti run sample runs/first")
