"""How the attempts of a run ended, with what was reported before: the cause first, then what followed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from smalti import ExitCode
from smalti.rundir import ENDINGS, Event, RunDirectory
from smalti.system import open_regular
from smalti_health import read_circuits
from smalti_webui.places.gallery.samples import events_of_kind

MEANINGS: dict[int, tuple[str, str]] = {
    ExitCode.DONE: ("complete", "With more steps, the same command trains longer."),
    ExitCode.FAILED: ("failed", "A retry fails the same way until the cause is fixed."),
    ExitCode.USAGE: ("a wrong option or configuration file", "Change the option that the message names."),
    ExitCode.PREFLIGHT: ("a check before the start failed", "Fix what the message names, then start again."),
    ExitCode.MISSING_PLUGIN: ("a plugin or package is missing", "Install what the message names."),
    ExitCode.GPU_FAULT: ("an accelerator failed", "Start again on another node."),
    ExitCode.PREEMPTED: ("preempted", "The same command resumes the run."),
    ExitCode.STOPPED: ("stopped on request", "The same command resumes the run."),
    ExitCode.CHECKPOINT: ("a checkpoint cannot be used", "Restore the files or options, or choose another checkpoint."),
    ExitCode.KILLED: (
        "a process was killed, vanished or hung",
        "Start again. Often the system killed it because memory ran out.",
    ),
    ExitCode.FAULT_LOOP: ("the same fault three times on this host", "Start on another node, or after the repair."),
    ExitCode.TAKEN_OVER: ("another launch has taken over the run directory", "The other launch continues the run."),
    ExitCode.UNAVAILABLE: ("unavailable for now", "Start again later."),
    ExitCode.INTERRUPTED: ("interrupted by Ctrl-C", "The same command resumes the run."),
}
"""What an exit code means, and whether to start again: the short form of the table in docs/operations.md."""
_CLEAN = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
_TAIL = 64 * 1024
_MOST_HANGS = 64


@dataclass(frozen=True, kw_only=True)
class Report:
    """One thing that was reported: an exception, a fault of an accelerator, or a warning. Times are unix seconds."""

    kind: str
    time: float
    step: int | None
    who: str
    message: str
    fix: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended. `reports` are those of its errors and faults, the earliest first; `warnings` are the others."""

    begun: float
    ended: float | None
    condition: str
    exit_code: int | None
    step: int | None
    message: str
    fix: str
    reports: tuple[Report, ...]
    warnings: tuple[Report, ...]

    @property
    def failed(self) -> bool:
        return self.condition in ("failed", "refused") or (self.exit_code is not None and self.exit_code not in _CLEAN)

    @property
    def meaning(self) -> tuple[str, str]:
        return MEANINGS.get(-1 if self.exit_code is None else self.exit_code, ("", ""))

    @property
    def cause(self) -> Report | None:
        """What was reported first."""
        return self.reports[0] if self.reports else None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A file with the stacks of ranks that made no progress: the end of its text."""

    name: str
    text: str


def attempts(run: RunDirectory) -> list[Attempt]:
    """All attempts, the latest first. That of a run without events is missing."""
    own = list(events_of_kind(run.events_file, "state", "error", "warning", "health"))
    others = [
        event for file in run.event_files() if file != run.events_file for event in events_of_kind(file, "error", "health")
    ]
    found: list[Attempt] = []
    for events in _by_attempt(own):
        begun, end = events[0].time, events[-1].time
        later = [event for event in others if begun <= event.time <= end + 60]
        found.append(_attempt(events, later))
    found = _with_status(run, found)
    return found[::-1]


def hangs(run: RunDirectory) -> list[Hang]:
    """The newest files about hangs."""
    own = run.path.resolve()
    found = sorted((path for path in (run.path / "hangs").glob("*") if path.is_file()), reverse=True)
    inside = [path for path in found if path.resolve().is_relative_to(own)]
    return [Hang(name=path.name, text=_end_of(path)) for path in inside[:_MOST_HANGS]]


def open_circuits(run: RunDirectory) -> list[str]:
    """A sentence for each node on which faults of an accelerator ended the last attempts."""
    return [
        f"node {node}: {circuit.faults[-1].kind} on {circuit.faults[-1].host}"
        for node, circuit in sorted(read_circuits(run.path).items())
        if circuit.state == "open" and circuit.faults
    ]


def split_fix(message: str) -> tuple[str, str]:
    """A message of the command line without its fix, and the fix."""
    for mark in ("\n  fix: ", "\n    fix: ", "; fix: ", " fix: "):
        head, found, fix = message.partition(mark)
        if found:
            return head.rstrip(" :\n"), fix.strip()
    return message.strip(), ""


def _by_attempt(events: Iterable[Event]) -> list[list[Event]]:
    groups: list[list[Event]] = []
    for event in events:
        if not groups or (event.kind == "state" and event.text("state") == "starting"):
            groups.append([])
        groups[-1].append(event)
    return groups


def _attempt(events: list[Event], others: list[Event]) -> Attempt:
    last = next((event for event in reversed(events) if event.kind == "state"), events[-1])
    ended = last.text("state") in (*ENDINGS, "refused")
    message, fix = split_fix(last.text("message"))
    code = last.number("exit_code")
    named = sorted((event for event in (*events, *others) if event.kind in ("error", "health")), key=lambda event: event.time)
    return Attempt(
        begun=events[0].time,
        ended=last.time if ended else None,
        condition=last.text("state"),
        exit_code=None if code is None else int(code),
        step=last.step,
        message=message,
        fix=fix,
        reports=tuple(map(_report, named)),
        warnings=tuple(_report(event) for event in events if event.kind == "warning"),
    )


def _with_status(run: RunDirectory, found: list[Attempt]) -> list[Attempt]:
    """The last attempt with the status that the processes show: one that was killed has written no end."""
    if not found or found[-1].ended is not None:
        return found
    status = run.status()
    message, fix = split_fix(status.message)
    last = replace(found[-1], condition=status.condition, message=message, fix=fix, exit_code=status.exit_code)
    return [*found[:-1], last]


def _report(event: Event) -> Report:
    message, fix = split_fix(event.text("message"))
    name = event.text("error") or event.text("fault")
    places = (f"{word} {event.fields[word]}" for word in ("rank", "node") if event.fields.get(word) is not None)
    who = ", ".join([*places, *(event.text(word) for word in ("host", "device") if event.text(word))])
    return Report(
        kind=event.kind,
        time=event.time,
        step=event.step,
        who=who,
        message=f"{name}: {message}" if name and not message.startswith(name) else message,
        fix=fix,
        traceback=event.text("traceback"),
    )


def _end_of(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL))
            return opened.read(_TAIL).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
