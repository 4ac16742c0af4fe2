"""Processes that end when their parent ends, however it ends. On Linux only; elsewhere they keep running.

Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import psutil

PARENT_VARIABLE = "SMALTI_PARENT"
"""The environment variable with the process id of that parent."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on, send SIGTERM to this process when its parent ends; at once if it has ended already."""
    if sys.platform != "linux" or PARENT_VARIABLE not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if _has_ended(int(os.environ[PARENT_VARIABLE])):
        os.kill(os.getpid(), signal.SIGTERM)


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
