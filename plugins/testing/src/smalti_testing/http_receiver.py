"""A real HTTP receiver on a loopback port, whose responses are scripted. One thread per connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.system import load_json

Behaviour = Callable[[socket.socket, threading.Event], None]


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request."""

    line: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = load_json(self.body)
        return found

    @property
    def id(self) -> str:
        return self.headers.get("webhook-id", "")


def status(code: int, **headers: str) -> Behaviour:
    """Answer with this status."""
    lines = [f"HTTP/1.1 {code} Whatever", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return raw("\r\n".join([*lines, "Content-Length: 2", "", "ok"]).encode())


def raw(data: bytes) -> Behaviour:
    """Answer with these bytes."""
    return lambda connection, closing: connection.sendall(data)


def hang(connection: socket.socket, closing: threading.Event) -> None:
    """Answer nothing until the receiver closes."""
    closing.wait(30)


def drip(data: bytes, seconds: float = 0.05) -> Behaviour:
    """Answer byte by byte, again and again, and never to the end."""

    def respond(connection: socket.socket, closing: threading.Event) -> None:
        for letter in data * 1000:
            connection.sendall(bytes([letter]))
            if closing.wait(seconds):
                return

    return respond


def reset(connection: socket.socket, closing: threading.Event) -> None:
    """Reset the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@dataclass
class Receiver:
    """Answers request number n with `script[n]`, and later ones with `default`."""

    script: list[Behaviour] = field(default_factory=list)
    default: Behaviour = field(default_factory=lambda: status(204))
    certificate: tuple[Path, Path] | None = None
    requests: list[Received] = field(default_factory=list)

    def __enter__(self) -> Receiver:
        self._closing = threading.Event()
        self._arrived = threading.Condition()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._context = None
        if self.certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*self.certificate)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}/hook"

    def wait_for(self, count: int, seconds: float = 10.0) -> list[Received]:
        """The requests, once there are so many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.requests) >= count, seconds), f"{len(self.requests)} of {count}"
            return list(self.requests)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(30)
            secure = self._context.wrap_socket(connection, server_side=True) if self._context else connection
            with secure:
                number = self._take(secure)
                behaviour = self.script[number] if number < len(self.script) else self.default
                behaviour(secure, self._closing)

    def _take(self, connection: socket.socket) -> int:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(connection)
        head, _, body = data.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in fields)}
        while len(body) < int(headers["content-length"]):
            body += self._more(connection)
        with self._arrived:
            self.requests.append(Received(line=line, headers=headers, body=body))
            self._arrived.notify_all()
            return len(self.requests) - 1

    def _more(self, connection: socket.socket) -> bytes:
        chunk = connection.recv(65536)
        if not chunk:
            raise ConnectionError
        return chunk
