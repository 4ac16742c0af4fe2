"""Processes that do not outlive the one that started them, however that ended. On Linux; elsewhere they go on.

Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import psutil

PARENT_VARIABLE = "SMALTI_PARENT"
"""The number of the process on which those that it starts depend."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the end of the process that started this one comes as SIGTERM; at once, if that one is gone already."""
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
