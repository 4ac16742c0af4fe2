"""GET requests for files of servers that are not trusted: with deadlines, a size limit, retries, and only public addresses."""

from __future__ import annotations

import http.client
import ipaddress
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from importlib.metadata import version
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

_BLOCK = 1 << 16
_LONGEST_WAIT = 30.0
_SILENCE = 15.0
"""Seconds without a byte after which a connection has failed."""
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class RefusedError(Exception):
    """The server does not have the file, or what it has cannot be used; another attempt would give the same."""


class FailedError(Exception):
    """All attempts failed for reasons that may pass: time-outs, lost connections, servers that are overloaded."""


class _PrivateAddressError(OSError):
    """The host has no public address."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Downloads files. Safe to use from several threads at once.

    `seconds` limits an attempt, `most_bytes` the file. The proxies of the environment are used; then the proxy decides which
    addresses can be reached. `first_wait` is the longest wait in seconds before the second attempt; it doubles each time, and
    the waits are drawn between 0 and that.
    """

    most_bytes: int
    seconds: float = 60.0
    attempts: int = 3
    private_addresses: bool = False
    first_wait: float = 1.0
    _tls: ssl.SSLContext = field(default_factory=ssl.create_default_context, init=False, repr=False)
    _proxies: dict[str, str] = field(default_factory=request.getproxies, init=False, repr=False)

    def get(self, url: str) -> bytes:
        """The file at an http or https URL. Raises RefusedError or FailedError with the reason."""
        try:
            parts = urlsplit(url.strip())
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefusedError("not the address of a web server: it must begin with http:// or https://")
        address = quote(url.strip(), safe="%/:=&?~#+!$,;'@()*[]")
        for attempt in range(self.attempts):
            try:
                return self._attempt(address)
            except _AgainError as error:
                if attempt + 1 == self.attempts:
                    raise FailedError(f"{error}, in {self.attempts} attempts") from error
                wait = random.uniform(0, min(_LONGEST_WAIT, self.first_wait * 2**attempt))
                time.sleep(max(wait, min(_LONGEST_WAIT, error.retry_after)))
        raise AssertionError("at least one attempt")

    def _attempt(self, url: str) -> bytes:
        connections: list[http.client.HTTPConnection] = []
        deadline = time.monotonic() + self.seconds
        # A server that sends a header byte by byte causes no time-out of the socket.
        timer = threading.Timer(self.seconds, _shut, (connections,))
        timer.daemon = True
        timer.start()
        try:
            found = request.Request(url, headers={"User-Agent": f"smalti/{version('smalti')}", "Accept-Encoding": "identity"})
            with self._opener(connections).open(found, timeout=min(self.seconds, _SILENCE)) as response:
                return self._body(response, deadline)
        except HTTPError as error:
            error.close()
            text = f"{error.code} {http.client.responses.get(error.code, '')}".strip()
            if error.code in _TRANSIENT:
                raise _AgainError(text, _seconds(error.headers)) from error
            raise RefusedError(text) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
            if isinstance(reason, _PrivateAddressError | ssl.SSLCertVerificationError) or type(reason) is ValueError:
                raise RefusedError(str(reason)) from error
            if time.monotonic() > deadline or isinstance(reason, TimeoutError):
                raise _AgainError("the server took too long") from error
            raise _AgainError(str(reason) or type(reason).__name__) from error
        finally:
            timer.cancel()

    def _body(self, response: Any, deadline: float) -> bytes:
        length = response.headers.get("Content-Length", "")
        announced = int(length) if length.isdecimal() else None
        if announced is not None and announced > self.most_bytes:
            raise RefusedError(f"larger than {self.most_bytes >> 20} MB")
        found = bytearray()
        while block := response.read1(_BLOCK):
            found += block
            if len(found) > self.most_bytes:
                raise RefusedError(f"larger than {self.most_bytes >> 20} MB")
            if time.monotonic() > deadline:
                break
        if time.monotonic() > deadline:  # a response that was shut down looks complete
            raise TimeoutError
        if not found:
            raise _AgainError("the server sent nothing")
        if announced is not None and len(found) != announced:
            raise _AgainError(f"the connection ended after {len(found)} of {announced} bytes")
        return bytes(found)

    def _opener(self, connections: list[http.client.HTTPConnection]) -> request.OpenerDirector:
        """Follows redirects to http and https alone; each connection checks the address that it connects to."""
        opener = request.OpenerDirector()
        connect = partial(_connected, self._is_allowed)
        handlers = (
            request.ProxyHandler(self._proxies),
            _Http(connect, connections),
            _Https(connect, connections, self._tls),
            _Redirects(),
            request.HTTPErrorProcessor(),
            request.HTTPDefaultErrorHandler(),
            request.UnknownHandler(),
        )
        for handler in handlers:
            opener.add_handler(handler)
        return opener

    def _is_allowed(self, host: str, address: str) -> bool:
        if self.private_addresses or any(urlsplit(proxy).hostname == host for proxy in self._proxies.values()):
            return True
        found = ipaddress.ip_address(address.partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        return found.is_global and not found.is_multicast


class _AgainError(Exception):
    """An attempt failed for a reason that may pass."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


_Connect = Callable[..., socket.socket]


class _Connection(http.client.HTTPConnection):
    def __init__(self, connect: _Connect, known: list[http.client.HTTPConnection], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._create_connection = connect
        known.append(self)


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, connect: _Connect, known: list[http.client.HTTPConnection], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._create_connection = connect
        known.append(self)


class _Redirects(request.HTTPRedirectHandler):
    """Follows them to other web servers, and not to files or FTP."""

    def redirect_request(
        self, req: request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Http(request.HTTPHandler):
    def __init__(self, connect: _Connect, known: list[http.client.HTTPConnection]) -> None:
        super().__init__()
        self._connection = partial(_Connection, connect, known)

    def http_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)


class _Https(request.HTTPSHandler):
    def __init__(self, connect: _Connect, known: list[http.client.HTTPConnection], tls: ssl.SSLContext) -> None:
        super().__init__(context=tls)
        self._connection = partial(_SecureConnection, connect, known, context=tls)

    def https_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)


def _connected(
    is_allowed: Callable[[str, str], bool], address: tuple[str, int], timeout: float, *others: object
) -> socket.socket:
    """Connects to the first address of a host that answers. The address is checked and used: it is not looked up again."""
    host, port = address
    failure: OSError = _PrivateAddressError(f"{host} has no public address; csv_allow_private_addresses: true allows it")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not is_allowed(host, str(place[0])):
            continue
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout)
            connection.connect(place)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _shut(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _seconds(headers: Message) -> float:
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0
