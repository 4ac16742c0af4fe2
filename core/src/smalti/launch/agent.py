"""Runs torch's or Accelerate's launcher of ranks, and adds what a run needs that loses a rank or reaches its time limit.

- It reports which ranks were killed by a signal: they cannot report it themselves.
- After a failure it kills the remaining ranks only once they make no progress. torch gives them 30 seconds to save and has no
  setting for it.
- If its parent is killed, it handles that like SIGTERM: the ranks save and exit. So it does with SIGUSR1 and SIGUSR2. If it is
  killed itself, the ranks save and exit on their own.

`python -m smalti.launch.agent MODULE [ARGUMENTS]` does what `python -m MODULE [ARGUMENTS]` does. In standby mode
(`smalti.launch.standby`) it waits for that command. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from smalti.errors import ExitCode
from smalti.system import (
    FOLDER_VARIABLE,
    PARENT_VARIABLE,
    SIGNALLED,
    ProcessExit,
    die_with_parent,
    ignore_write_errors,
    importing,
    keep_imports,
    latest_progress,
    write_exit_report,
    write_killed,
)

STAND_BY = "--stand-by="
"""The argument of standby mode, followed by the file descriptor from which the command is read."""
EXTENSION_VARIABLE = "SMALTI_AGENT_EXTENSION"
"""The environment variable with a "module:function" of a package, which is called here before ranks start. It may return a
function to call with the exit status once they have ended, which then reports failures of ranks.
"""
STOP_SECONDS = 600.0
"""A rank that was asked to stop is killed after this long without progress of a save. It may have to end a long validation."""
LOST_SECONDS = 120.0
"""The same after another rank failed: ranks that can exit do so within a minute (`smalti.training.failures.watchdog`)."""
_POLL_SECONDS = 0.1


def main() -> None:
    end = ProcessExit.install()
    keep_imports()
    ignore_write_errors()
    die_with_parent()
    with importing():
        import torch.distributed.launcher.api  # noqa: F401 - what all launchers need
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command: list[str] | None = sys.argv[1:]
    if sys.argv[1].startswith(STAND_BY):
        command = wait_for_command(int(sys.argv[1].removeprefix(STAND_BY)))
    if command is None:
        end.code = 0
        return
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE)  # torch creates a folder for logs there and does not remove it
    sys.argv = command
    extend_kill_timeout()
    forward_notices()
    extension = os.environ.get(EXTENSION_VARIABLE)
    finish: Callable[[int], None] | None = resolve_name(extension)() if extension else None
    status = 1
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        end.code = status = 0
    except ChildFailedError as error:
        write_killed({rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0})
        end.code = status
        if finish is None:
            raise
    except SignalException as stop:  # the ranks got the signal too, and report how they ended
        end.code = status = SIGNALLED + stop.sigval
    finally:
        if finish is not None:
            finish(status)


def wait_for_command(descriptor: int) -> list[str] | None:
    """Read the command to run and apply its environment to this process. None if the launch ended without one."""
    with os.fdopen(descriptor, encoding="ascii") as pipe:
        text = pipe.read()
    if not text.endswith("\n"):  # the writer ended, perhaps in the middle of it
        return None
    request = json.loads(text)
    os.environ.clear()
    os.environ.update(request["environment"])
    return list(request["command"])


def forward_notices() -> None:
    """Turn SIGUSR1 and SIGUSR2, which would kill torch's agent, into SIGTERM, which it forwards to its ranks."""
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(notice) is not signal.SIG_IGN:
            signal.signal(notice, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def extend_kill_timeout() -> None:
    """Let torch's agent kill a rank only once it makes no progress, however long its exit takes."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close = SubprocessContext.close

    def close_after_exit(self: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        ranks = {int(self.envs[local]["RANK"]): handler.proc for local, handler in self.subprocess_handlers.items()}
        if death_sig != signal.SIGKILL:
            for process in ranks.values():
                if process.poll() is None:
                    os.killpg(process.pid, death_sig or signal.SIGTERM)
            wait_for_ranks(ranks)
        close(self, signal.SIGKILL, timeout)  # kills the remaining ranks, and closes torch's own resources

    SubprocessContext.close = close_after_exit  # type: ignore[method-assign, assignment]


def wait_for_ranks(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended, or the remaining ones make no progress. Writes exit reports for those."""
    asked = time.time()
    while running := [rank for rank, process in ranks.items() if process.poll() is None]:
        lost = any(process.poll() for process in ranks.values())
        timeout = LOST_SECONDS if lost else STOP_SECONDS
        if all(time.time() - max(asked, latest_progress(rank)) > timeout for rank in running):
            why = "another rank failed" if lost else "it was asked to stop"
            for rank in running:
                message = f"made no progress for {timeout:.0f} s after {why}, and was killed"
                write_exit_report(ExitCode.KILLED, message, rank=rank, secondary=True)
            return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
