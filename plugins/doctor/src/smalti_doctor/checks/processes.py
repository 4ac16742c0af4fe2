"""Processes that an earlier run has left behind, and runs that look as if they were alive."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from smalti import Finding
from smalti.rundir import RunDirectory, find_runs
from smalti.system import format_bytes
from smalti_doctor.report import Section

_SECONDS = 20.0
_PART = re.compile(r"smalti\.launch\.(worker|agent)|smalti_health\.monitor\.process")
"""Modules that run only as a part of a run."""
_STARTS_RUNS = re.compile(r"smalti|python|accelerate|torchrun")
"""The programs that may be the parent of such a process while its run is alive."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Memory of a GPU, in bytes, that a process holds."""

    pid: int
    uuid: str
    memory: int


def processes(output_dir: Path | None, uses: list[GpuUse] | None = None) -> Section:
    """`uses` is what nvidia-smi says by default. Looks at the runs beside `output_dir`, or in the folder runs."""
    uses = gpu_uses() if uses is None else uses
    left = leftovers()
    runs = list(_runs(output_dir))
    facts = {
        "leftover": [{"pid": pid, "command": command} for pid, command in left.items()],
        "gpu_memory": [{"pid": use.pid, "uuid": use.uuid, "bytes": use.memory} for use in uses],
        "runs": [{"path": str(run.path), "condition": run.status().condition} for run in runs],
    }
    findings = [*_of_leftovers(left, uses), *_of_others(left, uses), *_of_runs(runs, output_dir)]
    if not left:
        findings.insert(0, Finding(check="processes", level="ok", message="no process of an earlier run is left"))
    return Section(name="processes", facts=facts, findings=findings)


def leftovers() -> dict[int, str]:
    """The command lines of parts of runs whose launcher is gone, by process id. Those of other containers are left out."""
    found: dict[int, str] = {}
    own = _namespace("self")
    parts = {
        each.pid: command
        for each in psutil.process_iter()
        if _PART.search(command := _command(each)) and _namespace(str(each.pid)) == own
    }
    for pid, command in parts.items():
        top = pid
        while (parent := _parent(top)) in parts:
            top = parent
        if parent in (0, 1) or not _STARTS_RUNS.search(_command_of(parent)):  # adopted by the system
            found[pid] = command
    return found


def gpu_uses() -> list[GpuUse]:
    """The processes that hold memory of NVIDIA GPUs; none where nvidia-smi does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = (tool, "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 3 and row[0].isdecimal()]
    return [
        GpuUse(pid=int(pid), uuid=uuid, memory=int(memory) << 20 if memory.isdecimal() else 0) for pid, uuid, memory in rows
    ]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _namespace(pid: str) -> str:
    """Of process ids; "" if it is unknown."""
    try:
        return str((Path("/proc") / pid / "ns/pid").readlink())
    except OSError:
        return ""


def _parent(pid: int) -> int:
    """0 if there is none."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.Error:
        return 0


def _command_of(pid: int) -> str:
    try:
        return _command(psutil.Process(pid))
    except psutil.Error:
        return ""


def _of_leftovers(left: Mapping[int, str], uses: list[GpuUse]) -> Iterator[Finding]:
    for pid, command in left.items():
        held = sum(use.memory for use in uses if use.pid == pid)
        memory = f", and holds {format_bytes(held)} of GPU memory" if held else ""
        message = f"the launcher of process {pid} is gone{memory}: {_short(command)}"
        fix = f"kill -9 {pid}, if it is still there after a minute: ranks of a launcher that was killed save before they end"
        yield Finding(check="processes", level="warning", message=message, fix=fix)


def _of_others(left: Mapping[int, str], uses: list[GpuUse]) -> Iterator[Finding]:
    for use in uses:
        if use.pid in left:
            continue
        command = _command_of(use.pid)
        who = _short(command) if command else "of another user or container"
        message = f"process {use.pid} holds {format_bytes(use.memory)} of GPU memory: {who}"
        yield Finding(check="processes", level="note", message=message)


def _short(command: str) -> str:
    return command if len(command) <= 120 else f"{command[:117]}..."


def _runs(output_dir: Path | None) -> Iterator[RunDirectory]:
    root = output_dir.parent if output_dir is not None else Path("runs")
    if root.is_dir():
        yield from find_runs(root, depth=1)


def _of_runs(runs: list[RunDirectory], output_dir: Path | None) -> Iterator[Finding]:
    for run in runs:
        status = run.status()
        own = output_dir is not None and run.path.absolute() == output_dir.absolute()
        if status.condition == "stale":
            message = f"{run.path} may still be in use: {status.message}"
            fix = "look for that process on its host; the next launch takes the directory over from a dead one"
            yield Finding(check="runs", level="warning", message=message, fix=fix)
        elif status.condition == "running":
            fix = f"smalti run stop {run.path}, before the same run starts again" if own else ""
            yield Finding(
                check="runs", level="warning" if own else "note", message=f"{run.path} is running: {status.message}", fix=fix
            )
        elif status.condition == "failed" and own:
            first = status.message.partition("\n")[0]
            message = f"{run.path} has ended with exit code {status.exit_code}: {first}"
            yield Finding(check="runs", level="note", message=message, fix="docs/operations.md says what each exit code means")
