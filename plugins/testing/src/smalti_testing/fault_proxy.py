"""A proxy in front of an object store that injects faults by rules, the same ones for the same seed.

    rules = [Rule(fault="503", operations={"get"}, count=2), Rule(fault="cut", chance=0.05)]
    with FaultProxy(store.endpoint, rules, seed=7) as proxy:
        ...  # a client of proxy.endpoint
    proxy.exchanges     what was asked, answered and done to it

Requests reach the store as they were signed: the Host header is passed through. A rule with a chance decides by the seed, the
request and how often that request was seen, so that threads may ask in any order. If the block raises, seed and faults are
printed.
Importing this module imports no torch.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from smalti.system import load_json, read_regular

Operation = Literal["put", "create", "part", "complete", "abort", "get", "range", "head", "list", "delete", "other"]
"""`create`, `part`, `complete` and `abort` are those of a multipart upload; `range` is a GET with a Range header."""

Fault = Literal[
    "500",
    "503",
    "429",
    "403",
    "404",
    "redirect",
    "error_body",
    "reset_before",
    "reset_after",
    "lost_reply",
    "cut",
    "cut_reset",
    "short_length",
    "long_length",
    "stall",
    "flip_get",
    "flip_put",
]
"""What happens to a request. The first eight are not passed on to the store; the others are.

- `500`, `503`, `429` (with Retry-After), `403`, `404`: that status with an error body of S3.
- `redirect`: 307 to the same address.
- `error_body`: status 200, and an error in the body, as CompleteMultipartUpload may answer.
- `reset_before`: the connection is reset instead of a reply.
- `reset_after`: the connection is reset after the header of the reply; `lost_reply`: before it, so the request took effect.
- `cut`, `cut_reset`: a part of the body, then the end of the connection, or a reset.
- `short_length`: a body that is shorter than the object, with the Content-Length of what is sent; `long_length`: a header that
  promises more than is sent.
- `stall`: a part of the body, then nothing for `Rule.seconds`.
- `flip_get`, `flip_put`: one bit of the reply's or of the request's body is another.
"""

FAULTS: tuple[Fault, ...] = get_args(Fault)
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_CODES = {"500": ("Internal Server Error", "InternalError"), "503": ("Service Unavailable", "SlowDown")}
_CODES |= {"429": ("Too Many Requests", "TooManyRequests"), "404": ("Not Found", "NoSuchKey")}
_CODES |= {"403": ("Forbidden", "AccessDenied")}
_BLOCK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which requests get a fault: those of `operations` (all, if empty) whose `path?query` `path` is found in.

    Of these the first `skip` are left alone, then each has the `chance`, until `count` were hit (None: no limit).
    """

    fault: Fault
    operations: frozenset[Operation] | set[Operation] = frozenset()
    path: str = ""
    """A regular expression, searched in the unquoted `path?query`, and in the body of a request that deletes several keys."""
    count: int | None = None
    chance: float = 1.0
    skip: int = 0
    seconds: float = 30.0
    """How long a `stall` lasts; it ends when the client closes the connection."""
    code: str = ""
    """The code in the error body instead of the usual one of this status, such as "RequestTimeTooSkewed"."""
    retry_after: int = 1
    """Seconds, in the header Retry-After of a `429` and a `503`."""

    def __post_init__(self) -> None:
        unknown = {self.fault} - set(FAULTS) | set(self.operations) - set(OPERATIONS)
        if unknown:
            raise ValueError(f"unknown fault or operation: {', '.join(sorted(unknown))}")


def read_rules(path: Path) -> list[Rule]:
    """Rules from a JSON file: a list of objects with the fields of `Rule`."""
    return [Rule(**{**entry, "operations": frozenset(entry.get("operations", ()))}) for entry in load_json(read_regular(path))]


@dataclass(kw_only=True)
class Exchange:
    """One request that the proxy saw. `status` 0: no header was sent. `sent` counts the bytes of the reply's body."""

    method: str
    path: str
    """With the query, unquoted."""
    operation: Operation
    range: str = ""
    fault: Fault | None = None
    status: int = 0
    received: int = 0
    sent: int = 0


@dataclass(kw_only=True)
class _Message:
    """A request or the head of a reply."""

    first: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def without(self, *names: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.headers if key.lower() not in names]

    def encoded(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass(kw_only=True)
class _Connection:
    """One client's connection, and the one to the store that serves it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        with suppress(OSError):  # the client has closed it
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def drop_upstream(self) -> None:
        if self.upstream is not None:
            self.upstream[1].transport.abort()
            self.upstream = None


class _EndOfConnectionError(Exception):
    """The client or the store has closed the connection, or a fault did."""


class FaultProxy:
    """Serves from a thread of its own between `__enter__` and `__exit__`. `seed` None: a random one."""

    def __init__(self, endpoint: str, rules: Iterable[Rule] = (), *, seed: int | None = None, port: int = 0) -> None:
        self.seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        self.exchanges: list[Exchange] = []
        self._host, self._port = str(urlsplit(endpoint).hostname), urlsplit(endpoint).port or 80
        self._rules: list[_Active] = []
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_unexpected)
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = socket.create_server(("127.0.0.1", port), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.add(*rules)

    @property
    def injected(self) -> list[Exchange]:
        """The requests that got a fault."""
        return [exchange for exchange in list(self.exchanges) if exchange.fault is not None]

    def add(self, *rules: Rule) -> None:
        """More rules, after those before them; the first that applies decides."""
        with self._lock:
            self._rules += [_Active(rule=rule, number=len(self._rules) + index) for index, rule in enumerate(rules)]

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._rules.clear()

    def hits(self, rule: Rule) -> int:
        """How many requests got this fault, of this very rule."""
        with self._lock:
            return sum(active.hit for active in self._rules if active.rule is rule)

    def __enter__(self) -> Self:
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._socket, limit=_BLOCK))
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            summary = Counter((exchange.operation, exchange.fault) for exchange in self.injected)
            print(f"fault proxy: seed {self.seed}, injected {dict(summary)}", flush=True)
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(reader=reader, writer=writer)
        try:
            while True:
                await self._serve(connection)
        except (_EndOfConnectionError, asyncio.IncompleteReadError):
            writer.close()
        except OSError:  # also: the store does not answer
            connection.reset()
        except asyncio.CancelledError:
            connection.reset()
        finally:
            connection.drop_upstream()
            self._tasks.discard(task)

    async def _serve(self, connection: _Connection) -> None:
        """One request and its reply."""
        request = await _read_request(connection)
        exchange = _exchange(request)
        several = exchange.operation == "delete" and exchange.method == "POST"
        rule = self._choose(exchange, exchange.path + (request.body.decode("utf-8", "replace") if several else ""))
        self.exchanges.append(exchange)
        fault = exchange.fault
        if rule is not None and fault in ("500", "503", "429", "403", "404", "redirect", "error_body", "reset_before"):
            self._refuse(connection, request, exchange, rule)
            await connection.writer.drain()
            return
        if fault == "flip_put":
            request.body = self._flipped(request.body, exchange)
        reply, reader = await self._forward(connection, request)
        if fault == "lost_reply":
            connection.reset()
            raise _EndOfConnectionError
        if rule is None or fault == "flip_put":
            await _relay(connection, exchange, reply, reader)
        else:
            reply.body = await _read_body(reader, reply, is_reply=True, method=exchange.method)
            await self._spoil(connection, exchange, rule, reply)

    def _choose(self, exchange: Exchange, named: str) -> Rule | None:
        """The rule that applies to a request, which names keys; its fault is entered into the exchange."""
        what = f"{exchange.method} {named} {exchange.range}"
        with self._lock:
            self._seen[what] += 1
            for active in self._rules:
                rule = active.rule
                if rule.operations and exchange.operation not in rule.operations:
                    continue
                if not re.search(rule.path, named):
                    continue
                active.matched += 1
                if active.matched <= rule.skip or (rule.count is not None and active.hit >= rule.count):
                    continue
                if rule.chance < 1 and self._random(active.number, what, self._seen[what]).random() >= rule.chance:
                    continue
                active.hit += 1
                exchange.fault = rule.fault
                return rule
        return None

    def _random(self, *words: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.seed, *words))))

    def _refuse(self, connection: _Connection, request: _Message, exchange: Exchange, rule: Rule) -> None:
        """Answer in the store's place."""
        fault = rule.fault
        if fault == "reset_before":
            connection.reset()
            raise _EndOfConnectionError
        if fault == "redirect":
            exchange.status = 307
            target = request.first.split(" ")[1]
            head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {self.endpoint}{target}\r\nContent-Length: 0\r\n\r\n"
            connection.writer.write(head.encode("latin-1"))
            return
        reason, code = _CODES.get(fault, ("OK", "InternalError"))
        exchange.status = 200 if fault == "error_body" else int(fault)
        code = rule.code or code
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected</Message></Error>'.encode()
        wait = f"Retry-After: {rule.retry_after}\r\n" if fault in ("429", "503") else ""
        head = (
            f"HTTP/1.1 {exchange.status} {reason}\r\nContent-Type: application/xml\r\n{wait}Content-Length: {len(body)}\r\n\r\n"
        )
        connection.writer.write(head.encode() + (b"" if exchange.method == "HEAD" else body))

    async def _forward(self, connection: _Connection, request: _Message) -> tuple[_Message, asyncio.StreamReader]:
        """Send the request to the store; the head of its reply, and where the body comes from."""
        if connection.upstream is not None and connection.upstream[0].at_eof():
            connection.drop_upstream()
        if connection.upstream is None:
            connection.upstream = await asyncio.open_connection(self._host, self._port, limit=_BLOCK)
        reader, writer = connection.upstream
        writer.write(request.encoded() + request.body)
        await writer.drain()
        while True:
            reply = _parsed(await reader.readuntil(b"\r\n\r\n"))
            if not reply.first.split(" ")[1].startswith("1"):
                return reply, reader

    async def _spoil(self, connection: _Connection, exchange: Exchange, rule: Rule, reply: _Message) -> None:
        """Send a reply of the store with a fault in it."""
        fault, body, writer = rule.fault, reply.body, connection.writer
        chance = self._random("where", exchange.method, exchange.path, exchange.range)
        end = chance.randrange(len(body)) if body else 0
        length = len(body)
        if fault == "flip_get":
            body = self._flipped(body, exchange)
        elif fault == "short_length":
            length, body = end, body[:end]
        elif fault == "long_length":
            length = len(body) + 1 + chance.randrange(1000)
        elif fault in ("cut", "cut_reset", "stall"):
            body = body[:end]
        elif fault == "reset_after":
            body = b""
        if exchange.method != "HEAD":
            reply.headers = [*reply.without("content-length", "transfer-encoding"), ("Content-Length", str(length))]
        whole = fault in ("flip_get", "short_length")
        if (fault in ("cut", "cut_reset") or fault == "stall") and not reply.body:
            data = reply.encoded()[:-4]  # no body to cut: within the header
        else:
            data = reply.encoded() + body
            exchange.status, exchange.sent = int(reply.first.split(" ")[1]), len(body)
        writer.write(data)
        await writer.drain()
        if whole:
            return
        if fault == "stall":
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(connection.reader.read(), rule.seconds)
        if fault in ("reset_after", "cut_reset"):
            await asyncio.sleep(0.02)  # a reset discards what the kernel has not yet given to the client
            connection.reset()
        raise _EndOfConnectionError

    def _flipped(self, body: bytes, exchange: Exchange) -> bytes:
        if not body:
            return body
        at = self._random("bit", exchange.method, exchange.path, exchange.range).randrange(len(body) * 8)
        changed = bytearray(body)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)


def _report_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's report of an exception that nobody waits for, unless a client or the store has reset its connection."""
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


@dataclass(kw_only=True)
class _Active:
    """A rule and how often it matched and hit."""

    rule: Rule
    number: int
    matched: int = field(default=0)
    hit: int = field(default=0)


async def _read_request(connection: _Connection) -> _Message:
    try:
        request = _parsed(await connection.reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as error:
        raise _EndOfConnectionError from error
    if request.get("expect").lower() == "100-continue":
        connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.body = await _read_body(connection.reader, request, is_reply=False)
    chunked = request.get("transfer-encoding") != ""
    request.headers = request.without("expect", "transfer-encoding")
    if chunked:
        request.headers.append(("Content-Length", str(len(request.body))))
    return request


def _parsed(head: bytes) -> _Message:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return _Message(first=first, headers=[(name, value.strip()) for name, _, value in pairs])


async def _read_body(reader: asyncio.StreamReader, message: _Message, *, is_reply: bool, method: str = "") -> bytes:
    """The whole body, without the framing of chunks."""
    if is_reply and (method == "HEAD" or message.first.split(" ")[1] in ("204", "304")):
        return b""
    if "chunked" in message.get("transfer-encoding").lower():
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while (await reader.readuntil(b"\r\n")).strip():
            pass
        return b"".join(parts)
    if length := message.get("content-length"):
        return await reader.readexactly(int(length))
    return await reader.read() if is_reply else b""


async def _relay(connection: _Connection, exchange: Exchange, reply: _Message, reader: asyncio.StreamReader) -> None:
    """Send a reply as it is, in blocks."""
    exchange.status = int(reply.first.split(" ")[1])
    length = reply.get("content-length")
    if not length or exchange.method == "HEAD" or exchange.status in (204, 304):
        ends = not length and not reply.get("transfer-encoding") and exchange.method != "HEAD" and exchange.status != 204
        body = await _read_body(reader, reply, is_reply=True, method=exchange.method)
        if exchange.method != "HEAD" and exchange.status != 204:
            reply.headers = [*reply.without("content-length", "transfer-encoding"), ("Content-Length", str(len(body)))]
        connection.writer.write(reply.encoded() + body)
        exchange.sent = len(body)
        if ends:
            connection.drop_upstream()
    else:
        connection.writer.write(reply.encoded())
        left = int(length)
        while left:
            block = await reader.read(min(left, _BLOCK))
            if not block:
                raise _EndOfConnectionError
            connection.writer.write(block)
            left -= len(block)
            exchange.sent += len(block)
            await connection.writer.drain()
    await connection.writer.drain()
    if reply.get("connection").lower() == "close":
        raise _EndOfConnectionError


def _exchange(request: _Message) -> Exchange:
    method, target, _ = request.first.split(" ", 2)
    path, _, query = target.partition("?")
    shown = unquote(path) + (f"?{unquote(query)}" if query else "")
    operation = _operation(method, path, dict(parse_qsl(query, keep_blank_values=True)), request)
    asked = request.get("range")
    return Exchange(method=method, path=shown, operation=operation, range=asked, received=len(request.body))


def _operation(method: str, path: str, query: dict[str, str], request: _Message) -> Operation:
    """Which operation of S3 a request is, by path style."""
    has_key = bool(path.strip("/").partition("/")[2])
    if not has_key:
        if method == "GET" and not query.keys() & {"location", "versioning", "uploads", "acl"}:
            return "list"
        return "delete" if method == "POST" and "delete" in query else "other"
    if method == "POST":
        return "create" if "uploads" in query else "complete" if "uploadId" in query else "other"
    if method == "PUT":
        return "part" if "partNumber" in query else "put"
    if method == "DELETE":
        return "abort" if "uploadId" in query else "delete"
    if method == "GET":
        return "other" if "uploadId" in query else "range" if request.get("range") else "get"
    return "head" if method == "HEAD" else "other"
