"""The dry run of `smalti train --dry-run --json` as a list of checks, in the order in which a launch makes them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smalti import UserError
from smalti.cli import counted
from smalti.rundir import RunDirectory

Level = Literal["ok", "warning", "error", "skipped"]
MARKS: Mapping[Level, str] = {"ok": "✓", "warning": "!", "error": "✗", "skipped": "–"}
WORDS: Mapping[Level, str] = {"ok": "passed", "warning": "note", "error": "failed", "skipped": "not checked"}
_PREFLIGHT = 3
_BUILT_IN = "smalti "
_LAUNCHERS = {
    "in-process": "in one process",
    "elastic": "started by torch.distributed.run",
    "accelerate": "started by accelerate",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the list. `details` are further lines, `fix` says what to do."""

    title: str
    level: Level
    text: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        return MARKS[self.level]

    @property
    def word(self) -> str:
        return WORDS[self.level]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What the page shows. `ready` says whether Start is possible, `reason` why it is not.

    `can_wait`: it is possible, or will be when the run that uses the run directory has ended.
    """

    checks: tuple[Check, ...]
    ready: bool
    reason: str = ""
    can_wait: bool = False
    command: str = ""
    environment: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    accelerate: Mapping[str, object] | None = None
    settings: Mapping[str, object] | None = None
    strategy: str = ""
    effective_batch: int = 0
    formula: str = ""
    buckets: tuple[tuple[str, int, int], ...] = ()
    """Size, samples, and the batches of them in an epoch."""
    steps: int = 0


def dry_run_of(answer: object, stderr: str, code: int, output_dir: Path | None) -> DryRun:
    """The answer of the command line as checks. `output_dir` is the run directory, if the options name one."""
    if not isinstance(answer, dict):
        text = stderr.strip().splitlines()[-1:] or [f"smalti train ended with exit code {code}"]
        failed = Check(title="Dry run", level="error", text=text[0].removeprefix("smalti: error: "))
        return DryRun(checks=(failed,), ready=False, reason=failed.text)
    if "problems" in answer:
        checks = tuple(_problems(answer["problems"], int(answer.get("exit_code", code))))
        count = sum(check.level == "error" for check in checks)
        reason = "a check failed" if count == 1 else f"{count} checks failed"
        return DryRun(checks=checks, ready=False, reason=reason)
    directory = _directory(output_dir)
    launch = answer["launch"]
    return DryRun(
        checks=(*_passed(answer), directory, *(Check(title="Note", level="warning", text=each) for each in answer["notices"])),
        ready=directory.level != "error",
        can_wait=True,
        reason=directory.text if directory.level == "error" else "",
        command=shlex.join(launch["command"]),
        environment=tuple(f"{name}={value}" for name, value in launch["environment"].items()),
        nodes=tuple(answer.get("nodes", ())),
        accelerate=launch["accelerate"] or None,
        settings=launch["settings"] or None,
        strategy=str(launch["strategy"]),
        effective_batch=int(answer["effective_batch"]),
        formula=_formula(answer),
        buckets=tuple(_buckets(answer)),
        steps=int(answer["steps"]),
    )


def _problems(problems: Sequence[Mapping[str, str]], code: int) -> Iterator[Check]:
    title = "Preflight" if code == _PREFLIGHT else "Options"
    if title != "Options":
        yield Check(title="Options", level="ok", text="all options are valid")
    for each in problems:
        lines = each["message"].splitlines() or [""]
        where = f"{each['where']}: " if each["where"] else ""
        yield Check(title=title, level="error", text=f"{where}{lines[0]}", details=tuple(lines[1:]), fix=each["fix"])
    for later in ("Strategy", "Device", "Data", "Batches", "Run directory"):
        yield Check(title=later, level="skipped", text="after the problems above are fixed")


def _passed(answer: Mapping[str, Any]) -> Iterator[Check]:
    changes, launch = answer["config"]["changes"], answer["launch"]
    yield Check(title="Options", level="ok", text=f"{len(changes)} differ from their defaults, all are valid")
    others = [each for each in answer["plugins"] if f" {_BUILT_IN}" not in each]
    yield Check(title="Plugins", level="ok", text=f"{len(others)} beside the built-in ones", details=tuple(others))
    ranks = counted(len(launch["ranks"]), "rank")
    started = _LAUNCHERS.get(launch["launcher"], launch["launcher"])
    text = f"{launch['strategy']}, {ranks} on this node, {started}"
    yield Check(title="Strategy", level="ok", text=text)
    for title, key in (("Device", "device"), ("Precision", "precision"), ("Tokens", "tokens"), ("Timesteps", "timesteps")):
        if key in answer:
            yield Check(title=title, level="ok", text=str(answer[key]))
    yield _data(answer)
    sizes = counted(len(answer["buckets"]), "bucket")
    enough = "have enough" if len(answer["buckets"]) > 1 else "has enough"
    text = f"{counted(answer['effective_batch'], 'sample')} in a step; {sizes} {enough}"
    yield Check(title="Batches", level="ok", text=text)
    yield Check(title="Length", level="ok", text=f"{answer['steps']} steps; an epoch has {answer['samples']} samples")


def _data(answer: Mapping[str, Any]) -> Check:
    unusable = answer["quarantined"]
    text = f"{counted(answer['samples'], 'sample')} in {counted(len(answer['buckets']), 'bucket')}"
    if not unusable:
        return Check(title="Data", level="ok", text=text)
    details = tuple(f"{each['key']}: {each['reason']}" for each in unusable[:10])
    return Check(title="Data", level="warning", text=f"{text}; {len(unusable)} files cannot be used", details=details)


def _directory(path: Path | None) -> Check:
    """What a launch would find in the run directory."""
    if path is None:
        return Check(title="Run directory", level="skipped", text="no output_dir is given")
    run = RunDirectory(path)
    try:
        record = run.record()
    except UserError as error:
        return Check(title="Run directory", level="error", text=error.message, fix=error.fix)
    if record is None:
        empty = not path.exists() or not any(path.iterdir())
        text = f"{path} is new" if empty else f"{path} exists and has no run"
        return Check(title="Run directory", level="ok", text=text)
    status = run.status()
    if status.condition == "running":
        fix = "stop that run, or choose another output_dir"
        return Check(title="Run directory", level="error", text=f"{path} is in use by a running run", fix=fix)
    last = run.latest("step")
    step = last.step if last is not None else None
    text = f"{path} has a run that is {status.condition}"
    return Check(title="Run directory", level="ok", text=f"{text}; it resumes after step {step}" if step else text)


def _formula(answer: Mapping[str, Any]) -> str:
    """How the effective batch comes about."""
    changes = answer["config"]["changes"]
    micro, accumulation = changes.get("train_batch_size", 1), changes.get("gradient_accumulation_steps", 1)
    ranks, context = changes.get("num_processes", 1), changes.get("context_parallel_size", 1)
    text = f"{micro} per rank x {ranks // context if context > 1 else ranks} "
    text += f"{'data ranks' if context > 1 else 'ranks' if ranks > 1 else 'rank'} x {accumulation} accumulated"
    product = micro * (ranks // max(1, context)) * accumulation
    return f"{text} = {answer['effective_batch']}" if product == answer["effective_batch"] else ""


def _buckets(answer: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    batch = max(1, int(answer["effective_batch"]))
    for each in answer["buckets"]:
        yield str(each["size"]), int(each["samples"]), int(each["samples"]) // batch
