"""The day: checks one after the other within the minutes, each in a process of its own. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from gpuday.checks import Check
from gpuday.processes import Setting, tail

_LATE = 2.5
"""A check is ended after this multiple of its minutes in the table: not before a minute, in a rehearsal not before five."""
State = dict[str, dict[str, object]]


@dataclass(kw_only=True)
class Day:
    """`minutes` are those of this call, `limit` the seconds of each check instead of the table's. `say` prints a line."""

    checks: Sequence[Check]
    setting: Setting
    minutes: float
    say: Callable[[str], object]
    limit: float | None = None
    done: State = field(default_factory=dict)

    @property
    def _file(self) -> Path:
        return self.setting.folder / "state.json"

    def go(self, *, again: bool = False) -> State:
        """Make all checks that are not done. What is done already, in this folder and on this hardware, is kept.

        `again`: make those again that have failed. Returns the results by name; those that were left out say why.
        """
        self.done = self._kept(again=again)
        begun = time.monotonic()
        for number, check in enumerate(self.checks, start=1):
            place = f"[{number}/{len(self.checks)}]"
            if check.name in self.done:
                self.say(f"{place} {check.name}: {self.done[check.name]['status']} before")
                continue
            left = self.minutes - (time.monotonic() - begun) / 60
            reason = lacking(check, self.setting) or ("" if check.minutes <= left else f"needs {check.minutes:g} more minutes")
            if reason:
                self.say(f"{place} {check.name}: left out: {reason}")
                continue
            self.say(f"{place} {check.name}: {check.what} (about {check.minutes:g} min; {self._rest(number)})")
            result = self._made(check)
            self.done[check.name] = result
            write(self._file, {"hardware": dict(self.setting.hardware), "checks": self.done})
            problems = result["problems"]
            assert isinstance(problems, list)
            self.say("\n".join([f"    {result['status']} in {result['seconds']:.0f} s", *(f"    {each}" for each in problems)]))
        return self.done | {check.name: self._left_out(check) for check in self.checks if check.name not in self.done}

    def _kept(self, *, again: bool) -> State:
        if not self._file.exists():
            return {}
        kept = json.loads(self._file.read_text())
        if kept["hardware"] != dict(self.setting.hardware):
            raise SystemExit(f"{self._file} is of other hardware or other versions; remove it, or take another --folder")
        return {name: each for name, each in kept["checks"].items() if not again or each["status"] == "passed"}

    def _rest(self, number: int) -> str:
        """What is still to come, for which there may not be time."""
        rest = [each for each in self.checks[number - 1 :] if each.name not in self.done and not lacking(each, self.setting)]
        return f"{len(rest)} left, about {sum(each.minutes for each in rest):.0f} min"

    def _left_out(self, check: Check) -> dict[str, object]:
        reason = lacking(check, self.setting) or "no time was left"
        return {"status": "left out", "problems": [reason], "figures": {}, "seconds": 0.0}

    def _made(self, check: Check) -> dict[str, object]:
        """The result of the check: whatever comes of it, the day continues."""
        setting = self.setting
        result, log = setting.folder / f"{check.name}.json", setting.folder / f"{check.name}.log"
        result.unlink(missing_ok=True)
        values = {**vars(setting), "folder": str(setting.folder)}
        limit = self.limit or max(300.0 if setting.rehearsed else 60.0, _LATE * 60 * check.minutes)
        begun = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuday.check", check.name, json.dumps(values), str(result)],
                env=setting.environment("check") | {"GPUDAY_CHECK": check.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        found: dict[str, object] = {"figures": {}, "seconds": time.monotonic() - begun}
        if code is None:
            problems = [f"ended after {limit:.0f} s, with figures missing\n{tail(log)}".strip()]
        elif code or not result.exists():
            problems = [f"the process of the check ended with exit code {code}\n{tail(log)}".strip()]
        else:
            found |= json.loads(result.read_text())
            device = str(setting.hardware["device"])
            figures = found["figures"]
            assert isinstance(figures, dict)
            problems = [str(found["failure"])] if "failure" in found else []
            problems = problems or check.problems(figures, device=device, rehearsed=setting.rehearsed)
        return found | {"status": "failed" if problems else "passed", "problems": problems}


def lacking(check: Check, setting: Setting) -> str:
    """What the check needs and this hardware has not; empty if nothing."""
    hardware: Mapping[str, object] = setting.hardware
    gpus, memory, nodes = (float(str(hardware.get(name, 0))) for name in ("gpus", "memory", "nodes"))
    if check.package and find_spec(check.package) is None:
        return f"needs the package {check.package}"
    if setting.rehearsed and check.only_cuda:
        return "needs a CUDA device"
    if setting.rehearsed and not check.nodes:
        return ""
    if check.nodes > nodes:
        return f"needs {check.nodes} nodes"
    if check.gpus > gpus:
        return f"needs {check.gpus} GPUs"
    return f"needs {check.memory:g} GiB" if check.memory > memory and not setting.rehearsed else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and all below it, which may have left its session."""
    import psutil

    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    with suppress(ProcessLookupError):  # all of its session have ended
        os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def write(path: Path, value: object) -> None:
    """Replace the file in one step: the day may be cut off at any moment."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=2) + "\n")
    new.replace(path)
