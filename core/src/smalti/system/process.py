"""The identity of a process, which stays unambiguous after the system reuses its process id, and its end with its parent.

A process ends when its parent ends, however it ends: on Linux only, elsewhere it keeps running. Importing this module imports
no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, identified beyond its `pid`, which the system gives to another process later.

    `pid_namespace` identifies the boot and the container in which `pid` is valid, `start_time` when the process started. Both
    are opaque and only compared. `start_time` is empty where the system does not report it. Run directories of earlier
    versions call them `space` and `birth`.
    """

    pid: int
    host: str
    pid_namespace: Annotated[str, Field(validation_alias=AliasChoices("pid_namespace", "space"))]
    start_time: Annotated[str, Field(validation_alias=AliasChoices("start_time", "birth"))]

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this host that is known to exist."""
        return cls(pid=pid, host=socket.gethostname(), pid_namespace=_pid_namespace(), start_time=_start_time(pid) or "")

    def alive(self) -> bool | None:
        """Whether it still runs; None if that is unknown here: another host or container, or missing permissions."""
        if self.pid_namespace != _pid_namespace():
            return None
        start_time = _start_time(self.pid)
        if start_time is not None:
            return start_time == self.start_time
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return None
        return None

    def status(self) -> str:
        """Its state as the system names it ("sleeping", "disk-sleep", "stopped" ...); "" if that is unknown."""
        import psutil

        if not self.alive():
            return ""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pid_namespace() -> str:
    """Equal in two processes if process ids mean the same in both."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str | None:
    """When the process started, in ticks since boot; "" if it has ended, None if that is unknown here."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the name of the program in parentheses, which may contain spaces and parentheses itself.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants. Workers have their own sessions, so killing a process group is not enough."""
    import psutil

    try:
        parent = psutil.Process(pid)
        parent.suspend()  # so that it starts no process while its children are listed
        children = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in (*children, parent):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


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
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
