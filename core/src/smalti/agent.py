"""Runs a launcher of processes, with four things that torch's own does not do for a run that loses one of them, or its time.

It writes down which of its ranks were killed, which their own last words cannot tell; it gives the ranks that are left time to
save before it kills them, where torch gives them 30 seconds and has no setting for it; and when the process that started it is
killed, it ends as by SIGTERM, so that the ranks save and leave; SIGUSR1 and SIGUSR2 have the same effect. When it is killed
itself, they do so by themselves.

Started as `python -m smalti.agent MODULE [ARGUMENTS]`, it does what `python -m MODULE [ARGUMENTS]` does. Importing this module
imports no torch.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

from smalti.ending import End
from smalti.lastwords import FOLDER_VARIABLE, SIGNALLED, leave_killed
from smalti.parentage import PARENT_VARIABLE, follow_parent
from smalti.streams import outlast

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

GRACE_SECONDS = 600
"""From the end of the first rank: enough to write what an accelerator holds to a slow disk. Only a rank that hangs takes it."""


def main() -> None:
    end = End.first()
    outlast()
    follow_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE)  # torch makes a folder for logs and leaves it behind
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    be_patient()
    pass_on_notices()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ChildFailedError as error:
        leave_killed({rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0})
        raise
    except SignalException as stop:  # which the ranks have been told, too; what they made of it they have said
        end.code = SIGNALLED + stop.sigval
    else:
        end.code = 0


def pass_on_notices() -> None:
    """Take SIGUSR1 and SIGUSR2, of which torch's agent knows nothing and dies, for SIGTERM, which it passes on to its ranks."""
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(notice) is not signal.SIG_IGN:
            signal.signal(notice, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def be_patient() -> None:
    """Let torch's agent wait longer between SIGTERM and SIGKILL; it does not say how long when it closes after a failure."""
    from torch.distributed.elastic.multiprocessing import PContext

    close = PContext.close

    def patient(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(self, death_sig, max(timeout, GRACE_SECONDS))

    PContext.close = patient  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
