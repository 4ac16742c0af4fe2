"""GET requests for files of servers that are not trusted: with deadlines, a size limit, retries, and only public addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import ssl
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore2
import httpx2

_LONGEST_WAIT = 30.0
_SILENCE = 15.0
"""Seconds without a byte after which a connection has failed."""
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_MOVED = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 10
_ATTEMPTS_IN_SILENCE = 3
"""At a host that does not answer at all: there each attempt may take as long as the deadline."""
_ANSWERED = (ConnectionResetError, httpcore2.ReadError, httpcore2.WriteError, httpcore2.ProtocolError)
"""What a server does that is there."""
_PASSING = (OSError, ImportError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError)
"""An ImportError is a SOCKS proxy whose package is missing: it says nothing about the file."""


class RefusedError(Exception):
    """The server does not have the file, or what it has cannot be used; another attempt would give the same."""


class FailedError(Exception):
    """All attempts failed for reasons that may pass: time-outs, lost connections, servers that are overloaded."""


class _AgainError(Exception):
    """An attempt failed for a reason that may pass."""

    def __init__(self, message: str, retry_after: float = 0.0, *, answered: bool = True) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.answered = answered


@dataclass(frozen=True, kw_only=True)
class Client:
    """Downloads files. Safe to use from several threads at once.

    `seconds` limits an attempt, `most_bytes` the file. A host that does not answer gets fewer `attempts`. The proxies of the
    environment are used; then the proxy decides which addresses can be reached. `first_wait` is the longest wait in seconds
    before the second attempt; it doubles each time, and the waits are drawn between 0 and that.
    """

    most_bytes: int
    seconds: float = 60.0
    attempts: int = 6
    private_addresses: bool = False
    first_wait: float = 1.0
    _tls: ssl.SSLContext = field(default_factory=ssl.create_default_context, init=False, repr=False)
    _proxies: dict[str, str] = field(default_factory=getproxies, init=False, repr=False)

    def get(self, url: str) -> bytes:
        """The file at an http or https URL. Raises RefusedError or FailedError with the reason."""
        for attempt in range(self.attempts):
            try:
                return self._attempt(url)
            except _AgainError as error:
                if attempt + 1 >= (self.attempts if error.answered else min(self.attempts, _ATTEMPTS_IN_SILENCE)):
                    raise FailedError(f"{error}, in {attempt + 1} attempts") from error
                wait = random.uniform(0, min(_LONGEST_WAIT, self.first_wait * 2**attempt))
                time.sleep(max(wait, min(_LONGEST_WAIT, error.retry_after)))
        raise AssertionError("at least one attempt")

    def _attempt(self, url: str) -> bytes:
        try:
            address = httpx2.URL(urlsplit(url.strip()).geturl())
            if not _is_web(address):
                raise RefusedError("not the address of a web server: it must begin with http:// or https://")
            return asyncio.run(self._download(address))
        except (ValueError, httpx2.InvalidURL) as error:
            raise RefusedError(str(error)) from error
        except (TimeoutError, httpcore2.TimeoutException) as error:
            raise _AgainError("the server took too long", answered=False) from error
        except _PASSING as error:
            reason = _innermost(error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise RefusedError(str(reason)) from error
            raise _AgainError(str(reason) or type(reason).__name__, answered=isinstance(error, _ANSWERED)) from error

    async def _download(self, url: httpx2.URL) -> bytes:
        agent = [("User-Agent", f"smalti/{version('smalti')}"), ("Accept-Encoding", "identity")]
        limits = dict.fromkeys(("connect", "read", "write"), min(self.seconds, _SILENCE))
        async with asyncio.timeout(self.seconds):
            for left in reversed(range(_MOST_REDIRECTS + 1)):
                async with (
                    self._pool(url) as pool,
                    pool.stream("GET", str(url), headers=agent, extensions={"timeout": limits}) as response,
                ):
                    headers = httpx2.Headers(response.headers)
                    if 200 <= response.status < 300:
                        return await self._body(response, headers.get("Content-Length", ""))
                    target = url.join(headers["Location"]) if "Location" in headers else None
                    if response.status not in _MOVED or target is None or not _is_web(target) or not left:
                        break
                    url = target
        text = f"{response.status} {httpx2.codes.get_reason_phrase(response.status)}".strip()
        if response.status in _TRANSIENT:
            wait = headers.get("Retry-After", "")
            raise _AgainError(text, float(wait) if wait.isdecimal() else 0.0)
        raise RefusedError(text)

    async def _body(self, response: httpcore2.Response, length: str) -> bytes:
        found = bytearray()
        if length.isdecimal() and int(length) > self.most_bytes:
            raise RefusedError(f"larger than {self.most_bytes >> 20} MB")
        async for block in response.aiter_stream():
            found += block
            if len(found) > self.most_bytes:
                raise RefusedError(f"larger than {self.most_bytes >> 20} MB")
        if not found:
            raise _AgainError("the server sent nothing")
        return bytes(found)

    def _pool(self, url: httpx2.URL) -> httpcore2.AsyncConnectionPool:
        address = self._proxies.get(url.scheme)
        if address is None or proxy_bypass(url.host):
            backend = httpcore2.AnyIOBackend() if self.private_addresses else _PublicAddresses()
            return httpcore2.AsyncConnectionPool(ssl_context=self._tls, network_backend=backend)
        try:
            found = httpx2.Proxy(address if "://" in address else f"http://{address}")
        except (ValueError, httpx2.InvalidURL) as error:
            raise _AgainError(str(error), answered=False) from error
        proxy = httpcore2.Proxy(str(found.url), auth=found.raw_auth)
        return httpcore2.AsyncConnectionPool(ssl_context=self._tls, proxy=proxy)


class _PublicAddresses(httpcore2.AnyIOBackend):
    """Connects to the first public address of a host that answers. What is checked is used: it is not looked up again."""

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        failure: Exception = RefusedError(f"{host} has no public address; csv_allow_private_addresses: true allows it")
        for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if _is_public(str(place[0])):
                try:
                    return await super().connect_tcp(str(place[0]), port, *args, **kwargs)
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    failure = error
        raise failure


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return found.is_global and not found.is_multicast


def _is_web(url: httpx2.URL) -> bool:
    return url.scheme in ("http", "https") and bool(url.host)


def _innermost(error: BaseException) -> BaseException:
    """What the system or TLS said, of an error that was raised while another was handled."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error
