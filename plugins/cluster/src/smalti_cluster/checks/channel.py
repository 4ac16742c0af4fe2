"""Messages between nodes: JSON objects over TCP, each preceded by its length in four bytes."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from smalti.system import load_json

_LENGTH = struct.Struct("!I")
_LARGEST = 16 * 2**20
"""Bytes of a message. Another program that connects to the port announces more, or never completes its message."""
_SEND_SECONDS = 20.0

Message = dict[str, object]


class Channel:
    """One end of a connection. Not for several threads at the same time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        connection.settimeout(_SEND_SECONDS)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """The address of the other end; "" if the connection is within this process."""
        return _plain(self._socket.getpeername()[0]) if self._socket.family != socket.AF_UNIX else ""

    def send(self, message: Mapping[str, object]) -> None:
        """Raises OSError if the other end has gone."""
        data = json.dumps(message, default=str).encode()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, seconds: float | None = None) -> Message:
        """The next message. Raises TimeoutError, ConnectionError if the other end has gone or sends something else."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (message := self.take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not _readable(self._socket, left):
                raise TimeoutError("no answer")
            self.read()
        return message

    def read(self) -> None:
        """Read what has arrived; blocks if nothing has. Raises ConnectionError if the other end has gone."""
        data = self._socket.recv(2**16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._received += data

    def take(self) -> Message | None:
        """The next message among what was read; None if it is not complete. Raises ConnectionError for anything else."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _LARGEST:
            raise ConnectionAbortedError("another program, which is not smalti, is at the other end")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = load_json(data)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("another program, which is not smalti, is at the other end")
        return cast(Message, message)

    def is_open(self) -> bool:
        """Whether the other end is still there, as far as known here."""
        try:
            return not _readable(self._socket, 0.0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        """Also ends a `receive` in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _readable(connection: socket.socket, seconds: float | None) -> bool:
    """Whether something arrives within this time. A poll object has no limit on the number of a descriptor."""
    if connection.fileno() < 0:
        raise ConnectionAbortedError("the connection is closed")
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _plain(address: str) -> str:
    """An IPv4 address as such, also where it reached a socket for both versions."""
    return address.removeprefix("::ffff:")
