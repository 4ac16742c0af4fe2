"""Run a module in a child process with a time limit, because drivers hang and libraries crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from smalti.system import PARENT_VARIABLE, load_json

_REAP_SECONDS = 2.0
"""A killed process that waits for a driver does not end. It is left behind."""


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """`values` is the JSON object that the module has printed in its last line; empty unless `state` is "done".

    `error` is one sentence about a child that hung or failed.
    """

    state: Literal["done", "hung", "failed"]
    values: Mapping[str, object]
    error: str = ""


def run_in_child(
    module: str, arguments: Sequence[str] = (), *, seconds: float, environment: Mapping[str, str] | None = None
) -> ChildResult:
    """Run `python -m module` in a process group of its own, which is killed after this time.

    The module calls `smalti.system.die_with_parent`, so that it does not outlive this process, also after Ctrl-C. The current
    folder is not searched for modules, so that a file of the user's cannot take the place of a library.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return ChildResult(state="hung", values={}, error=f"it did not return within {seconds:g} s")
    except BaseException:
        _kill(process)
        raise
    lines = output.decode(errors="replace").splitlines()
    if process.returncode == 0 and lines:
        with suppress(ValueError):
            return ChildResult(state="done", values=cast(Mapping[str, object], load_json(lines[-1])))
    return ChildResult(state="failed", values={}, error=_reason(process.returncode, errors.decode(errors="replace")))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_SECONDS)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _reason(status: int, errors: str) -> str:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    if status < 0:
        with suppress(ValueError):
            return f"it was killed by {signal.Signals(-status).name}{f' ({last})' if last else ''}"
    return last or f"it ended with status {status}"
