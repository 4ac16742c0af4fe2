"""E: receivers of webhooks that fail in every way, and processes that are killed between an event and its delivery."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

from smalti_health.webhooks.delivery.addresses import AddressRefusedError, resolve
from smalti_health.webhooks.delivery.channel import Channel
from smalti_health.webhooks.delivery.outbox import Event, Outbox
from smalti_health.webhooks.delivery.process import SenderProcess
from smalti_health.webhooks.delivery.request import Limits, post
from smalti_health.webhooks.delivery.sender import Setup
from smalti_health.webhooks.endpoints import Endpoint
from smalti_testing.http_receiver import Behaviour, Received, Receiver, drip, hang, raw, reset, status

from .subject import Report

MARKER = "MARKER-5ECRET-0123456789"
KEY = base64.b64encode(b"k" * 32).decode()
SHORT = Limits(connect=0.2, total=0.2)
CASES = 60
REFUSED = ("127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.1.1.1", "64:ff9b::7f00:1", "fd00::1", "100.64.0.9")
RANK = (
    "import json, os, sys\n"
    "from smalti_health.webhooks.delivery.outbox import Event\n"
    "from smalti_health.webhooks.delivery.process import SenderProcess\n"
    "from smalti_health.webhooks.delivery.sender import Setup\n"
    "sender = SenderProcess(Setup.from_json(sys.stdin.readline().encode()))\n"
    "for line in sys.stdin:\n"
    "    sender.send(Event.from_json(json.loads(line)))\n"
    "os.kill(os.getpid(), 9)\n"
)


def failing_receivers(chance: Random, place: Path) -> Report:
    """E1: 60 cases in one process, with a clock that is turned; E2: real senders and ranks that are killed."""
    report = Report()
    for number in range(CASES):
        _case(report, chance, place / str(number))
    _rank_killed(report, chance, place / "rank")
    _sender_killed(report, chance, place / "sender")
    return report


def few_failing_receivers(chance: Random, place: Path) -> Report:
    report = Report()
    for number in range(10):
        _case(report, chance, place / str(number))
    return report


def _case(report: Report, chance: Random, run: Path) -> None:
    """Some events, some faults before the receiver recovers. Critical events arrive, with one id, or are in the outbox."""
    with Receiver(script=[_fault(chance) for _ in range(chance.randrange(1, 5))]) as receiver:
        if chance.random() < 0.1:
            receiver.script, receiver.default = [], status(410)
        endpoint = _endpoint(receiver)
        outbox, reports, now = Outbox(run), list[str](), time.time()
        channel = Channel(
            endpoint, outbox, post=lambda *request: post(*request, limits=SHORT), report=reports.append, uniform=chance.uniform
        )
        events = [_event(f"msg_{number}", critical=chance.random() < 0.5, at=now) for number in range(chance.randrange(1, 5))]
        for event in events:
            if event.critical:
                outbox.add(event, [endpoint])
            channel.add(event, now)
        while (due := channel.due()) is not None:
            now = max(now, due)
            channel.attempt(now)
        _check(report, receiver, events, reports, outbox, endpoint)
    report.faults += len(receiver.script) or 1
    address = chance.choice(REFUSED)
    try:
        resolve("host", 80, allow_private=False, seconds=1, resolver=lambda host, port: ["1.1.1.1", address])
        report.expect(False, f"{address} was accepted")
    except AddressRefusedError:
        report.faults += 1


def _check(
    report: Report, receiver: Receiver, events: list[Event], reports: list[str], outbox: Outbox, endpoint: Endpoint
) -> None:
    arrived = {each.id for each in receiver.requests}
    statuses = {row.event.id: row.status for row in outbox.rows()}
    gone = endpoint.id in outbox.disabled()
    for event in events:
        if event.critical:
            expected = "disabled" if gone else "delivered"
            report.expect(statuses.get(event.id) == expected, f"{event.id} is {statuses.get(event.id)}, not {expected}")
            report.expect(gone or event.id in arrived, f"{event.id} is critical and has not arrived")
    report.expect(len(receiver.requests) == 1 or not gone, "a request followed 410")
    for request in receiver.requests:
        report.expect(_is_signed(request), f"{request.id} is not signed")
    files = b"".join(path.read_bytes() for path in outbox.folder.parent.rglob("*") if path.is_file())
    shown = "\n".join([*reports, repr(endpoint), endpoint.name]).encode() + files
    report.expect(MARKER.encode() not in shown and KEY.encode() not in shown, "a secret was shown")


def _rank_killed(report: Report, chance: Random, run: Path) -> None:
    """A rank sends events and is killed at once. All of them arrive."""
    run.mkdir(parents=True)
    with Receiver() as receiver:
        events = [_event(f"msg_{number}", critical=True, at=time.time()) for number in range(chance.randrange(1, 20))]
        text = "\n".join(
            [Setup(endpoints=(_endpoint(receiver),), run=run).to_json(), *(json.dumps(asdict(each)) for each in events)]
        )
        code = subprocess.run([sys.executable, "-c", RANK], input=text, text=True, timeout=60, check=False).returncode
        report.expect(code == -signal.SIGKILL, f"the rank ended with {code}")
        report.expect(
            _within(20, lambda: {each.id for each in receiver.requests} >= {each.id for each in events}), "an event is lost"
        )
    report.faults += 1


def _sender_killed(report: Report, chance: Random, run: Path) -> None:
    """A sender is killed at a random moment. The next one delivers what was not, with the same ids."""
    run.mkdir(parents=True)
    with Receiver(script=[chance.choice((hang, status(503)))]) as receiver:
        setup = Setup(endpoints=(_endpoint(receiver),), run=run, end_seconds=10)
        names = [f"msg_{number}" for number in range(4)]
        first = SenderProcess(setup)
        for name in names:
            first.send(_event(name, critical=True, at=time.time()))
        report.expect(_within(20, lambda: len(list(Outbox(run).rows())) == len(names)), "an event is not in the outbox")
        time.sleep(chance.random() * 0.05)
        process = first._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        again = SenderProcess(Setup(**{**vars(setup), "takes_over": True}))
        again.start()
        again.finish()
        report.expect({each.id for each in receiver.requests} == set(names), "an event is lost, or has another id")
        found = {row.status for row in Outbox(run).rows()}
        report.expect(found == {"delivered"}, f"the outbox has {found}")
    report.faults += 1


def _endpoint(receiver: Receiver) -> Endpoint:
    return Endpoint(kind="raw", url=f"{receiver.url}/{MARKER}", auth_token=MARKER, secrets=(KEY,), allow_private=True)


def _event(name: str, *, critical: bool, at: float) -> Event:
    return Event(id=name, type="error", level="error", time=at, payload={"type": "error"}, text="", critical=critical)


def _fault(chance: Random) -> Behaviour:
    code = chance.choice((300, 301, 302, 307, 308, 400, 401, 403, 404, 408, 425, 500, 502, 503, 504))
    return chance.choice(
        (
            status(code, Location="http://127.0.0.1:1/"),
            status(429, Retry_After=str(chance.randrange(100))),
            reset,
            hang,
            drip(b"HTTP/1.1 200 OK\r\nA: b\r\n"),
            raw(chance.randbytes(chance.randrange(200))),
            raw(f"HTTP/1.1 500 {MARKER}\r\n\r\n".encode()),
        )
    )


def _is_signed(request: Received) -> bool:
    content = f"{request.id}.{request.headers['webhook-timestamp']}.".encode() + request.body
    digest = base64.b64encode(hmac.digest(base64.b64decode(KEY), content, hashlib.sha256)).decode()
    return request.headers["webhook-signature"] == f"v1,{digest}"


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()
