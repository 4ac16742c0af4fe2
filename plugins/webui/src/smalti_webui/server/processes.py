"""Commands of smalti as processes: those whose result a page shows, and those that outlive the server.

Arguments are lists and never pass a shell. What needs torch runs here, so the server imports none.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from smalti import Problem
from smalti.system import kill_tree, load_json
from smalti_webui.server.departure import while_waited_for

_AT_ONCE = 2
_LINE = 1 << 20
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a command. `json` is its output, read as JSON; None if it is not JSON. `timed_out`: it was ended."""

    code: int
    stdout: str
    stderr: str
    json: Any | None = None
    timed_out: bool = False


def failure(done: Result, command: str) -> Problem:
    """What a command ended with, in its own words."""
    lines = [line.strip() for line in done.stderr.strip().splitlines()]
    message = next((line for line in lines if line.startswith("smalti: error:")), "")
    place = lines.index(message) if message else 0
    rest = lines[place + 1 :] if message else lines[-3:]
    fix = next((line.removeprefix("fix: ") for line in rest if line.startswith("fix: ")), "")
    details = " ".join(line.removeprefix("- ") for line in rest if line.startswith("- "))
    text = message.removeprefix("smalti: error: ") or " ".join(rest) or f"{command} ended with exit code {done.code}"
    return Problem(message=f"{text} {details}".strip(), fix=fix)


def command(args: Sequence[str]) -> list[str]:
    """The argument list of a command of smalti, with the Python of the server."""
    return [sys.executable, "-m", "smalti", *args]


def environment() -> dict[str, str]:
    """The environment of a command: the server's, without colours."""
    return {**os.environ, "NO_COLOR": "1"}


async def run_cli(
    args: Sequence[str], timeout: float, input: str | None = None, cwd: Path | None = None, *, changes: bool = False
) -> Result:
    """Run a command of smalti and wait for it. After `timeout` seconds it is ended, with everything that it has started.

    Relative paths start at `cwd`, by default the server's folder. At most two run at the same time; others wait.

    If the browser goes away, the command is ended too, unless it `changes` something.
    """
    work = _run(args, timeout, input, cwd)
    return await (work if changes else while_waited_for(work))


async def _run(args: Sequence[str], timeout: float, input: str | None, cwd: Path | None) -> Result:
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)):
        process = await _start(args, stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, cwd=cwd)
        timed_out, sent = False, None if input is None else input.encode()
        try:
            out, err = await asyncio.wait_for(process.communicate(sent), timeout)
        except TimeoutError:
            timed_out, out, err = True, b"", f"the command did not end within {timeout:g} seconds and was ended".encode()
        finally:
            await _end(process)
    text = out.decode(errors="replace")
    found = None
    with suppress(ValueError):
        found = load_json(text)
    code = process.returncode if process.returncode is not None else -1
    return Result(code=code, stdout=text, stderr=err.decode(errors="replace"), json=found, timed_out=timed_out)


async def stream_cli(args: Sequence[str]) -> AsyncIterator[str]:
    """The lines of a command's output and errors, as they are written. The command ends when the reader stops reading."""
    process = await _start(args, stderr=subprocess.STDOUT)
    try:
        while line := await process.stdout.readline():  # type: ignore[union-attr]
            yield line.decode(errors="replace").rstrip("\n")
        await process.wait()
    finally:
        await _end(process)


async def _start(args: Sequence[str], **streams: Any) -> asyncio.subprocess.Process:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return await asyncio.create_subprocess_exec(
        *command(args), env=environment(), start_new_session=True, limit=_LINE, **streams
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            kill_tree(process.pid)
        await process.wait()


def start_detached(args: Sequence[str], log: Path, cwd: Path, variables: Mapping[str, str] | None = None) -> int:
    """Start a command of smalti that continues when the server ends. Returns its process id. Its output is added to `log`.

    `variables` are added to its environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(args),
            cwd=cwd,
            env={**environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()  # no zombie is left
    return process.pid
