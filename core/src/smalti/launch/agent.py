"""Runs a launcher of processes, with four things that torch's own does not do for a run that loses one of them, or its time.

It writes down which of its ranks were killed, which their own last words cannot tell; it kills those that are left only when
they make no progress any more, where torch gives them 30 seconds to save and has no setting for it; and when the process that
started it is killed, it ends as by SIGTERM, so that the ranks save and leave; SIGUSR1 and SIGUSR2 have the same effect. When it
is killed itself, they do so by themselves.

Started as `python -m smalti.launch.agent MODULE [ARGUMENTS]`, it does what `python -m MODULE [ARGUMENTS]` does; as one that
stands by (`smalti.launch.standby`), when it is told to. Importing this module imports no torch.
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
from collections.abc import Mapping

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
    write_exit_report_for,
    write_killed,
)

STAND_BY = "--stand-by="
"""The argument of one that stands by, with the number of the descriptor on which it is told what to do."""
STOP_SECONDS = 600.0
"""For a rank that was asked to stop, since it was asked or last got on with a save: it may have a long validation to end."""
LOST_SECONDS = 120.0
"""The same once another rank has failed: those that can leave do so in less than a minute
(`smalti.training.failures.watchdog`).
"""
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

    words: list[str] | None = sys.argv[1:]
    if sys.argv[1].startswith(STAND_BY):
        words = wait_for_command(int(sys.argv[1].removeprefix(STAND_BY)))
    if words is None:
        end.code = 0
        return
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE)  # torch makes a folder for logs and leaves it behind
    sys.argv = words
    extend_kill_timeout()
    forward_notices()
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except ChildFailedError as error:
        write_killed({rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0})
        raise
    except SignalException as stop:  # which the ranks have been told, too; what they made of it they have said
        end.code = SIGNALLED + stop.sigval
    else:
        end.code = 0


def wait_for_command(descriptor: int) -> list[str] | None:
    """The words to run, in whose environment this process then is; None if nothing is wanted of it."""
    with os.fdopen(descriptor, encoding="ascii") as line:
        told = line.read()
    if not told.endswith("\n"):  # whoever was to say it has ended, perhaps while he said it
        return None
    order = json.loads(told)
    os.environ.clear()
    os.environ.update(order["environment"])
    return list(order["words"])


def forward_notices() -> None:
    """Take SIGUSR1 and SIGUSR2, of which torch's agent knows nothing and dies, for SIGTERM, which it passes on to its ranks."""
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(notice) is not signal.SIG_IGN:
            signal.signal(notice, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def extend_kill_timeout() -> None:
    """Let torch's agent kill a rank only when it makes no progress any more, however long it takes in all."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close = SubprocessContext._close

    def patient(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        ranks = {int(self.envs[local]["RANK"]): handler.proc for local, handler in self.subprocess_handlers.items()}
        if death_sig != signal.SIGKILL:
            for process in ranks.values():
                if process.poll() is None:
                    os.killpg(process.pid, death_sig)
            wait_for(ranks)
        close(self, signal.SIGKILL, timeout)  # those that are still there, and what torch has to close besides

    SubprocessContext._close = patient  # type: ignore[method-assign]


def wait_for(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Until all of them have ended, or those that have not make no progress; of these it is written down."""
    asked = time.time()
    while running := [rank for rank, process in ranks.items() if process.poll() is None]:
        lost = any(process.poll() for process in ranks.values())
        patience = LOST_SECONDS if lost else STOP_SECONDS
        if all(time.time() - max(asked, latest_progress(rank)) > patience for rank in running):
            why = "another rank failed" if lost else "it was asked to stop"
            for rank in running:
                write_exit_report_for(rank, f"made no progress for {patience:.0f} s after {why}, and was killed")
            return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
