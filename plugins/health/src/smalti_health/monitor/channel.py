"""Messages between the ranks of a node and its monitor: JSON over datagram sockets, from processes of the same user only.

The addresses are abstract ones of Linux, which leave no files.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

from smalti.system import load_json

_LARGEST = 65536
_CREDENTIALS = struct.Struct("iII")


def address(run: str, node: int, port: str, end: str) -> bytes:
    """The address of one end: "monitor" or "rank-K". `port` is that of the ranks, which distinguishes runs on a machine."""
    digest = hashlib.sha256(f"{run}/{node}/{port}".encode()).hexdigest()[:32]  # an address has at most 107 bytes
    return f"\0smalti-health/{os.getuid()}/{digest}/{end}".encode()


class Channel:
    """One end. Raises OSError if the address is taken."""

    def __init__(self, own: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(own)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, to: bytes, message: Mapping[str, object]) -> bool:
        """Whether it was delivered to the queue of the other end. Never waits."""
        with suppress(OSError):
            self._socket.sendto(json.dumps(message).encode(), socket.MSG_DONTWAIT, to)
            return True
        return False

    def receive(self, seconds: float) -> dict[str, object] | None:
        """The next message of this user; None after this time, or for one that is not to be read."""
        self._socket.settimeout(seconds)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:  # the time is over, or the channel was closed
            return None
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                _, user, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                if user == os.getuid():
                    with suppress(ValueError):
                        found = load_json(data)
                        return found if isinstance(found, dict) else None
        return None

    def wake(self) -> None:
        """Let `receive`, in another thread, return None now."""
        with suppress(OSError):
            self._socket.sendto(b"", socket.MSG_DONTWAIT, self._socket.getsockname())

    def close(self) -> None:
        self._socket.close()
