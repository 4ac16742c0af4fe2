"""Direct connections between nodes: whether each reaches the others on ports that the system chooses, and how fast."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

CONNECT_SECONDS = 4.0
"""A node that has not answered by then counts as unreachable. A lost first packet is repeated after one second."""
_PROBE, _TRANSFER = b"p", b"t"
_HEADER = struct.Struct("!16scd")
_COUNT = struct.Struct("!Q")
_BLOCK = 2**18
_BUFFER = 2**20
"""Bytes in flight at most, so that a slow link is drained soon."""
_SILENCE_SECONDS = 30.0

Peers = Mapping[str, tuple[str, int]]
"""Address and port by number of node, as in JSON."""


class PeerPort:
    """A port that the system chooses, for connections of other nodes. `token` keeps other programs away."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()[:16].ljust(16)
        self._socket = _listener()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="peer-port", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="peer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, struct.error):
            connection.settimeout(_SILENCE_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            token, kind, seconds = _HEADER.unpack(_exactly(connection, _HEADER.size))
            if token != self._token:
                return
            if kind == _PROBE:
                connection.sendall(_PROBE)
                return
            received = _drain(connection)
            connection.sendall(_COUNT.pack(received))
            _send_for(connection, seconds)


def connect_all(peers: Peers, token: str) -> dict[str, str]:
    """Connect to all of them at the same time. Returns the reason for each that cannot be reached."""
    failed, waiting = {}, {}
    header = _HEADER.pack(token.encode()[:16].ljust(16), _PROBE, 0.0)
    poll = select.poll()
    for name, (host, port) in peers.items():
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            failed[name] = error.strerror or str(error)
            continue
        connection.setblocking(False)
        code = connection.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            waiting[connection.fileno()] = (name, connection)
            poll.register(connection, select.POLLOUT)
        else:
            failed[name] = os.strerror(code)
            connection.close()
    deadline = time.monotonic() + CONNECT_SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        for number, event in poll.poll(left * 1000):
            name, connection = waiting[number]
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0 and event & select.POLLOUT:
                with suppress(OSError):
                    connection.send(header)
                poll.modify(number, select.POLLIN)
                continue
            reason = os.strerror(code) if code else _answer_of(connection)
            if reason:
                failed[name] = reason
            poll.unregister(number)
            connection.close()
            del waiting[number]
    for name, connection in waiting.values():
        failed[name] = f"no answer within {CONNECT_SECONDS:.0f} s"
        connection.close()
    return failed


def transfer(host: str, port: int, token: str, seconds: float) -> tuple[float, float]:
    """Send for this long, then receive for this long. Returns both rates in bytes per second. Raises OSError."""
    with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
        connection.settimeout(_SILENCE_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        connection.sendall(_HEADER.pack(token.encode()[:16].ljust(16), _TRANSFER, seconds))
        begun = time.monotonic()
        _send_for(connection, seconds)
        connection.shutdown(socket.SHUT_WR)
        (arrived,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
        turned = time.monotonic()
        received = _drain(connection)
        return arrived / (turned - begun), received / (time.monotonic() - turned)


def rounds(count: int) -> dict[str, list[list[tuple[int, int]]]]:
    """Which nodes exchange data at the same time: first in pairs, each node with two others, then one half with the other."""
    pairs = [
        [(a, a + 1) for a in range(0, count - 1, 2)],
        [(a, a + 1) for a in range(1, count - 1, 2)],
        [(count - 1, 0)] if count > 2 else [],
    ]
    if count > 2 and count % 2 == 0:
        pairs = [pairs[0], [*pairs[1], *pairs[2]]]
    half = count // 2
    halves = [[(a, a + half) for a in range(half)]] if count > 3 else []
    return {"pairs": [each for each in pairs if each], "halves": halves}


def best_rates(measured: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """The highest rate of each node over its pairs. A slow node makes its partners slow in one pair, but not in the other."""
    best: dict[int, float] = {}
    for pair, rate in measured.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), rate)
    return best


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)


def _answer_of(connection: socket.socket) -> str:
    """Why a connection was not answered as expected; "" if it was."""
    try:
        return "" if connection.recv(1) == _PROBE else "another program answers"
    except OSError as error:
        return error.strerror or str(error)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data


def _drain(connection: socket.socket) -> int:
    """Receive until the other end stops sending. Returns the number of bytes."""
    buffer, total = bytearray(_BLOCK), 0
    while size := connection.recv_into(buffer):
        total += size
    return total


def _send_for(connection: socket.socket, seconds: float) -> None:
    block, deadline = bytes(_BLOCK), time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.sendall(block)
