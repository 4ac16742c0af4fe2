"""One POST to an endpoint, with a limit on its whole duration. Redirects are not followed, proxies are not used."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from smalti_health.webhooks.delivery.addresses import (
    AddressRefusedError,
    ResolutionError,
    Resolver,
    resolve,
    system_resolver,
)
from smalti_health.webhooks.endpoints import Endpoint, redacted

CONNECT_SECONDS = 5.0
TOTAL_SECONDS = 15.0
_LARGEST_HEAD = 65536
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back: the HTTP status, or an error. `refused` means that the address is not allowed: no request was made."""

    status: int | None = None
    reason: str = ""
    retry_after: float | None = None
    error: str = ""
    refused: bool = False

    def __str__(self) -> str:
        return self.error or f"HTTP {self.status} {self.reason}".strip()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds. `total` covers resolving, connecting, sending and the head of the response."""

    connect: float = CONNECT_SECONDS
    total: float = TOTAL_SECONDS


def post(
    endpoint: Endpoint,
    headers: Mapping[str, str],
    body: bytes,
    *,
    limits: Limits = Limits(),
    resolver: Resolver = system_resolver,
    now: Callable[[], float] = time.time,
) -> Reply:
    """Send a body once. Errors are in the reply, without parts of the URL."""
    deadline = time.monotonic() + limits.total
    try:
        return _exchange(endpoint, headers, body, deadline, limits, resolver, now)
    except AddressRefusedError as error:
        return Reply(error=str(error), refused=True)
    except ResolutionError as error:
        return Reply(error=str(error))
    except TimeoutError:
        return Reply(error="no response in time")
    except ssl.SSLCertVerificationError as error:
        return Reply(error=f"the certificate is not valid: {redacted(error.verify_message, [endpoint])}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return Reply(error=redacted(f"{type(error).__name__}: {text}".removesuffix(": "), [endpoint]))


def _exchange(
    endpoint: Endpoint,
    headers: Mapping[str, str],
    body: bytes,
    deadline: float,
    limits: Limits,
    resolver: Resolver,
    now: Callable[[], float],
) -> Reply:
    parts = urlsplit(endpoint.url)
    host, secure = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    connected_by = min(deadline, time.monotonic() + limits.connect)
    addresses = resolve(host, port, allow_private=endpoint.allow_private, seconds=_left(connected_by), resolver=resolver)
    connection = _connect(addresses, port, connected_by)
    try:
        if secure:
            connection.settimeout(_left(deadline))
            connection = _context(endpoint).wrap_socket(connection, server_hostname=host)
        connection.settimeout(_left(deadline))
        target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        connection.sendall(_head(target, parts.netloc.rpartition("@")[2], headers, len(body)) + body)
        return _reply(connection, deadline, now)
    finally:
        connection.close()


def _connect(addresses: list[str], port: int, deadline: float) -> socket.socket:
    """A connection to the first address that accepts one."""
    failure: OSError = TimeoutError()
    for number, address in enumerate(addresses):
        try:
            return socket.create_connection((address, port), timeout=_left(deadline) / (len(addresses) - number))
        except OSError as error:
            failure = error
    raise failure


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not endpoint.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _head(target: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    fields = {"Host": host, **headers, "Content-Length": str(length), "Connection": "close"}
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _reply(connection: socket.socket, deadline: float, now: Callable[[], float]) -> Reply:
    """The head of the final response. The body is not read."""
    received = b""
    while True:
        while b"\r\n\r\n" not in received:
            connection.settimeout(_left(deadline))  # before each read: a slow sender gets no more time than others
            chunk = connection.recv(_CHUNK)
            if not chunk:
                raise ConnectionError("the connection was closed before a response was complete")
            received += chunk
            if len(received) > _LARGEST_HEAD:
                raise http.client.LineTooLong("head")
        head, _, received = received.partition(b"\r\n\r\n")
        line, _, fields = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not (words[1].isdigit() and len(words[1]) == 3):
            raise http.client.BadStatusLine("this is not HTTP")
        if not words[1].startswith("1"):  # an interim response precedes the final one
            break
    status = int(words[1])
    parsed = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
    reason = http.client.responses.get(status, "")  # the receiver's own words may repeat what was sent
    return Reply(status=status, reason=reason, retry_after=retry_after(parsed.get("Retry-After"), now()))


def retry_after(value: str | None, now: float) -> float | None:
    """The seconds that a Retry-After header asks for, as seconds or as a date. None without one, or if it cannot be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds and seconds != float("inf") else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
