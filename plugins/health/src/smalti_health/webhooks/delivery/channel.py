"""The events for one endpoint: in order, with waits between attempts. It knows neither threads nor real time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from smalti_health.webhooks.delivery.outbox import DELIVERED, DISABLED, FAILED, PENDING, Event, Outbox
from smalti_health.webhooks.delivery.request import Reply, post as real_post
from smalti_health.webhooks.delivery.retry import after
from smalti_health.webhooks.discord import discord_body
from smalti_health.webhooks.endpoints import Endpoint
from smalti_health.webhooks.signing import signed_headers

LONGEST_QUEUE = 500
AGENT = "smalti-webhooks"
Post = Callable[[Endpoint, Mapping[str, str], bytes], Reply]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An event that is to be sent at `due`."""

    event: Event
    due: float
    attempts: int = 0


@dataclass
class Counts:
    """What became of the events of one endpoint."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class Channel:
    """Sends the events of one endpoint. `report` gets a sentence about each event that is not delivered in the end.

    An event that waits for its next attempt does not hold up later ones, except after a response with Retry-After.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        outbox: Outbox | None,
        *,
        post: Post = real_post,
        report: Report = lambda sentence: None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.endpoint = endpoint
        self.counts = Counts()
        self._outbox = outbox
        self._post = post
        self._report = report
        self._uniform = uniform
        self._waiting: list[Waiting] = []
        self._closed_until = 0.0
        self._disabled = outbox is not None and endpoint.id in outbox.disabled()
        self._failing = False
        self._sending = False

    def __len__(self) -> int:
        """How many events are not done with: those that wait, and one that is being sent."""
        return len(self._waiting) + self._sending

    def add(self, event: Event, now: float, *, attempts: int = 0) -> None:
        """Queue an event. Of progress only the newest waits, and of a full queue the oldest that is not critical goes."""
        if event.type == "training.progress":
            self._waiting = [each for each in self._waiting if each.event.type != event.type]
        if len(self._waiting) >= LONGEST_QUEUE:
            oldest = next((each for each in self._waiting if not each.event.critical), self._waiting[0])
            self._waiting.remove(oldest)
            self.counts.dropped += 1
        self._waiting.append(Waiting(event=event, due=now, attempts=attempts))

    def due(self) -> float | None:
        """When the next attempt is to be made; None if nothing waits."""
        return max(self._closed_until, min(each.due for each in self._waiting)) if self._waiting else None

    def attempt(self, now: float) -> None:
        """Send the first event that is due, if there is one."""
        waiting = next((each for each in self._waiting if each.due <= now), None)
        if waiting is None or now < self._closed_until:
            return
        self._waiting.remove(waiting)
        self._sending = True
        self._finish(waiting, now)
        self._sending = False

    def hurry(self, now: float) -> None:
        """The run ends: try everything at once that waits, however long it was to wait."""
        self._closed_until = 0.0
        self._waiting = [replace(each, due=min(each.due, now)) for each in self._waiting]

    def _finish(self, waiting: Waiting, now: float) -> None:
        event, attempts = waiting.event, waiting.attempts + 1
        if self._disabled:
            self._record(event, DISABLED, waiting.attempts, "HTTP 410 Gone", now)
            return
        reply = self._post(self.endpoint, *message(self.endpoint, event, int(now)))
        found = after(reply, attempts, critical=event.critical, age=now - event.time, uniform=self._uniform)
        if found.result == "retry":
            if not self._failing:
                self._report(f"{self.endpoint.name}: {reply}; {event.type} is sent again later")
            self._failing = True
            self._waiting.append(Waiting(event=event, due=now + found.seconds, attempts=attempts))
            if reply.retry_after:
                self._closed_until = now + found.seconds
            self._record(event, PENDING, attempts, str(reply), now)
            return
        self._failing = False
        if found.result == "delivered":
            self.counts.delivered += 1
            self._record(event, DELIVERED, attempts, str(reply), now)
            return
        self.counts.failed += 1
        if found.result == "disabled":
            self._disabled = True
            if self._outbox is not None:
                self._guarded(lambda outbox: outbox.disable(self.endpoint, now))
            self._report(f"{self.endpoint.name}: HTTP 410 Gone; nothing more is sent there in this run")
        else:
            self._report(f"{self.endpoint.name}: {event.type} is not delivered: {reply}")
        self._record(event, DISABLED if found.result == "disabled" else FAILED, attempts, str(reply), now)

    def _record(self, event: Event, status: str, attempts: int, last: str, now: float) -> None:
        if event.critical:
            self._guarded(lambda outbox: outbox.update(event, self.endpoint, status, attempts, last, now))

    def _guarded(self, write: Callable[[Outbox], None]) -> None:
        """A run directory that cannot be written delays no delivery."""
        if self._outbox is None:
            return
        try:
            write(self._outbox)
        except OSError as error:
            self._report(f"{self._outbox.folder}: {error.strerror or error}")


def message(endpoint: Endpoint, event: Event, timestamp: int) -> tuple[dict[str, str], bytes]:
    """Headers and body of an event. The time is that of the attempt, because receivers refuse old ones."""
    headers = {"Content-Type": "application/json", "User-Agent": AGENT, **endpoint.headers}
    if endpoint.auth_token:
        headers["X-API-Key"] = endpoint.auth_token
    if endpoint.kind == "discord":
        return headers, discord_body(endpoint.message_prefix, event.text)
    payload = dict(event.payload)
    if endpoint.message_prefix:
        payload["message"] = f"{endpoint.message_prefix} {payload.get('message', '')}".strip()
    body = json.dumps(payload, separators=(",", ":")).encode()
    return headers | signed_headers(endpoint.secrets, event.id, timestamp, body), body
