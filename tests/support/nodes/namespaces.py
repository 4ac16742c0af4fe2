"""System calls for namespaces, which Python 3.11 does not have."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
BIND, PRIVATE = 0x1000, (1 << 18) | 0x4000
_SET_DEATH_SIGNAL, _SET_SUBREAPER, _SET_MEMORY, _MEMORY_MAP, _MEMORY_MAP_SIZE = 1, 36, 35, 14, 15
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[object] = []


def unshare(flags: int) -> None:
    _call("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _call(f"mount {source} on {target}", result)


def unmount(target: str) -> None:
    _call(f"umount {target}", _libc.umount2(target.encode(), 2))  # also where a process is still in it


def set_host_name(name: str) -> None:
    _call("sethostname", _libc.sethostname(name.encode(), len(name)))


def end_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def adopt_orphans(adopt: bool) -> None:
    """Whether descendants whose parents end from now on become children of this process."""
    _libc.prctl(_SET_SUBREAPER, int(adopt), 0, 0, 0)


def become_root() -> None:
    """A user namespace in which this user is root."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


@cache
def can_show() -> bool:
    """Whether `show_as` does anything: the kernel may be built without it."""
    size = ctypes.c_uint()
    return sys.platform == "linux" and _libc.prctl(_SET_MEMORY, _MEMORY_MAP_SIZE, ctypes.byref(size), 0, 0) == 0


def show_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let /proc show this command and environment for this process, as if it had been executed with them."""
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    block = ctypes.create_string_buffer(arguments + variables, len(arguments) + len(variables))
    _kept.append(block)
    begin = ctypes.addressof(block)
    middle, end = begin + len(arguments), begin + len(arguments) + len(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code, data, heap = fields[23:25], fields[42:44], fields[44]
    _libc.sbrk.restype = ctypes.c_void_p
    places = [*map(int, (*code, *data, heap)), _libc.sbrk(0), int(fields[25]), begin, middle, middle, end]
    layout = struct.pack("11QQII", *places, 0, 0, 0xFFFFFFFF)
    with suppress(OSError):
        _call("prctl", _libc.prctl(_SET_MEMORY, _MEMORY_MAP, layout, len(layout), 0))


def _call(name: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
