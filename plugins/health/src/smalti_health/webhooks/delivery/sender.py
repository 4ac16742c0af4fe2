"""The process that sends events: `python -m smalti_health.webhooks.delivery.sender`.

It is a process and not a thread, because a rank that hangs in the driver holds the GIL, and one that is killed takes its
threads along. Here an event is safe as soon as it is in the pipe. The first line of the standard input is the `Setup`, each
further line an event, {} the end of the run. It is a session of its own, so that Ctrl-C does not end it.

On the standard output: a line {"report": "..."} for what goes wrong, and at the end {"delivered": N, "failed": N, ...}.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from smalti.system import load_json
from smalti_health.webhooks.delivery.channel import Channel, Post
from smalti_health.webhooks.delivery.outbox import PENDING, Event, Outbox
from smalti_health.webhooks.delivery.request import post as real_post
from smalti_health.webhooks.endpoints import Endpoint

END_SECONDS = 15.0
_PARENT_SECONDS = 1.0
ORPHAN_SECONDS = 60.0
"""For how long it goes on after its rank died without an end of the run."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a sender needs to know. `run` is the run directory, None for no outbox.

    `lost` is the event to send if the rank ends without an end of the run and without an error. With `takes_over` it sends the
    pending events that earlier launches left on this node, of `nodes` nodes.
    """

    endpoints: tuple[Endpoint, ...]
    run: Path | None
    node: int = 0
    nodes: int = 1
    takes_over: bool = False
    lost: Event | None = None
    end_seconds: float = END_SECONDS
    orphan_seconds: float = ORPHAN_SECONDS

    def to_json(self) -> str:
        values = {**asdict(self), "run": None if self.run is None else str(self.run)}
        return json.dumps({**values, "endpoints": [each.to_json() for each in self.endpoints]})

    @classmethod
    def from_json(cls, text: bytes) -> Setup:
        values = cast(dict[str, object], load_json(text))
        endpoints = tuple(Endpoint.from_json(each) for each in cast(list[Mapping[str, object]], values["endpoints"]))
        run = Path(str(values["run"])) if values["run"] is not None else None
        lost = Event.from_json(cast(Mapping[str, object], values["lost"])) if values["lost"] is not None else None
        return cls(**{**values, "endpoints": endpoints, "run": run, "lost": lost})  # type: ignore[arg-type]


class Sender:
    """One thread for each endpoint, so that one that hangs delays no other."""

    def __init__(self, setup: Setup, report: Callable[[str], None], *, post: Post = real_post) -> None:
        self._outbox = None if setup.run is None else Outbox(setup.run, node=setup.node)
        self._report = report
        self._wake = threading.Condition()
        self._ended_at: float | None = None
        uniform = random.SystemRandom().uniform
        self._channels = [Channel(each, self._outbox, post=post, report=report, uniform=uniform) for each in setup.endpoints]
        self._arriving: dict[str, list[tuple[Event, int]]] = {each.endpoint.id: [] for each in self._channels}
        if setup.takes_over and self._outbox is not None:
            self._take_over(self._outbox, setup.nodes)
        self._threads = [threading.Thread(target=self._work, args=(each,), daemon=True) for each in self._channels]
        for thread in self._threads:
            thread.start()

    def add(self, event: Event) -> None:
        """Take an event. A critical one is in the outbox when this returns."""
        wanted = [each for each in self._channels if each.endpoint.wants(event.level)]
        if event.type == "training.progress":  # a chat is no plot
            wanted = [each for each in wanted if each.endpoint.kind != "discord" or each.endpoint.level == "debug"]
        if event.critical and wanted and self._outbox is not None:
            try:
                if not self._outbox.add(event, [each.endpoint for each in wanted]):
                    return  # a sender that has died had written it
            except OSError as error:
                self._report(f"{self._outbox.folder}: {error.strerror or error}; {event.type} is lost if it cannot be sent now")
        with self._wake:
            for each in wanted:
                self._arriving[each.endpoint.id].append((event, 0))
            self._wake.notify_all()

    def finish(self, seconds: float) -> dict[str, int]:
        """Send what waits, for at most this long; returns how many events were delivered, failed, dropped, and still wait."""
        with self._wake:
            self._ended_at = time.monotonic()
            self._wake.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        counts = [asdict(each.counts) for each in self._channels]
        found = {name: sum(each[name] for each in counts) for name in ("delivered", "failed", "dropped")}
        return {**found, "pending": sum(len(each) for each in self._channels)}

    def _take_over(self, outbox: Outbox, nodes: int) -> None:
        try:
            for row in outbox.take_over(nodes):
                for channel in self._channels:
                    delivery = row.deliveries.get(channel.endpoint.id)
                    if delivery is not None and delivery.status == PENDING:
                        self._arriving[channel.endpoint.id].append((row.event, delivery.attempts))
        except OSError as error:
            self._report(f"{outbox.folder}: {error.strerror or error}")

    def _work(self, channel: Channel) -> None:
        arriving, hurried = self._arriving[channel.endpoint.id], False
        while True:
            with self._wake:
                due = channel.due()
                if not arriving and self._ended_at is None:
                    self._wake.wait(None if due is None else max(0.0, due - time.time()))
                elif not arriving and due is not None and hurried:
                    self._wake.wait(max(0.0, due - time.time()))
                while arriving:
                    event, attempts = arriving.pop(0)
                    channel.add(event, time.time(), attempts=attempts)
                if self._ended_at is not None and not hurried:
                    hurried = True
                    channel.hurry(time.time())
                if hurried and not len(channel) and not arriving:
                    return
            channel.attempt(time.time())


def lines(source: int, rank: int) -> Iterator[bytes]:
    """The lines of a pipe until it is closed, or the process `rank`, which writes into it, is gone.

    A child of the rank may keep the pipe open.
    """
    rest = b""
    while True:
        readable, _, _ = select.select([source], [], [], _PARENT_SECONDS)
        if not readable and os.getppid() != rank:
            return
        if readable:
            chunk = os.read(source, 65536)
            if not chunk:
                return
            *complete, rest = (rest + chunk).split(b"\n")
            yield from complete


def dated(event: Event, now: float) -> Event:
    """The event as one of this moment."""
    payload = {**event.payload, "timestamp": datetime.fromtimestamp(now, UTC).isoformat()}
    return replace(event, time=now, payload=payload)


def say(message: Mapping[str, object]) -> None:
    with suppress(OSError):  # the rank is gone
        os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, whose end ends this process
    rank = int(sys.argv[1])
    source = lines(0, rank)
    setup = Setup.from_json(next(source))
    sender = Sender(setup, lambda sentence: say({"report": sentence}))
    ended = reported = False
    for line in source:
        with suppress(ValueError, KeyError, TypeError):  # the rank was killed while it wrote
            values = load_json(line)
            if not values:
                ended = True
                break
            event = Event.from_json(values)
            reported |= event.type == "error"
            sender.add(event)
    if not ended and not reported and setup.lost is not None:
        sender.add(dated(setup.lost, time.time()))
    say(sender.finish(setup.end_seconds if ended else setup.orphan_seconds))
    os._exit(0)  # without waiting for a thread that hangs


if __name__ == "__main__":
    main()
