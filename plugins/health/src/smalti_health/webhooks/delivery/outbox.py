"""Critical events in the run directory: what was delivered where, and what the next launch has to send.

    webhooks/outbox/ID.json     one event: its body, and its status by endpoint
    webhooks/disabled.json      endpoints that answered 410 (Gone), and when

A file is replaced atomically. URLs are not written: an endpoint is known by its `id`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from smalti.system import Process, atomic_write, load_json, read_regular
from smalti_health.webhooks.endpoints import Endpoint

FOLDER = "webhooks"
PENDING, DELIVERED, FAILED, DISABLED = "pending", "delivered", "failed", "disabled"


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event as it is sent. `id` is the same in every attempt. `text` is what Discord shows."""

    id: str
    type: str
    level: str
    time: float
    payload: Mapping[str, object]
    text: str
    critical: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Event:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The status of an event at one endpoint. `last` is what came back at the last attempt, `at` its time."""

    endpoint: str
    status: str = PENDING
    attempts: int = 0
    last: str = ""
    at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """An event of the outbox. `node` is the node that sends it, `sender` the process that does."""

    event: Event
    deliveries: Mapping[str, Delivery]
    node: int = 0
    sender: Mapping[str, object] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The worst status: pending, failed, disabled, delivered."""
        found = {each.status for each in self.deliveries.values()}
        return next((status for status in (PENDING, FAILED, DISABLED) if status in found), DELIVERED)


class Outbox:
    """The outbox of one run directory, for the threads of one process."""

    def __init__(self, run: Path, *, node: int = 0) -> None:
        self.folder = run / FOLDER / "outbox"
        self._disabled_file = run / FOLDER / "disabled.json"
        self._node = node
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}

    def add(self, event: Event, endpoints: Iterable[Endpoint]) -> bool:
        """Write an event that is not delivered yet. False if the outbox has it already. Raises OSError."""
        with self._lock:
            if event.id in self._rows or (self.folder / f"{event.id}.json").exists():
                return False
            deliveries = {each.id: Delivery(endpoint=each.name) for each in endpoints}
            self._write(Row(event=event, deliveries=deliveries, node=self._node, sender=_this_process()))
            return True

    def update(self, event: Event, endpoint: Endpoint, status: str, attempts: int, last: str, at: float) -> None:
        """Write what came of an attempt, if the event is in the outbox. Raises OSError."""
        with self._lock:
            if (row := self._rows.get(event.id)) is None:
                return
            delivery = Delivery(endpoint=endpoint.name, status=status, attempts=attempts, last=last, at=at)
            self._write(replace(row, deliveries={**row.deliveries, endpoint.id: delivery}))

    def take_over(self, nodes: int) -> list[Row]:
        """The rows with pending deliveries of this node, oldest first, which are this process's from now on.

        Of `nodes` nodes; those of nodes that the run had earlier are divided among them. Rows of a sender that is still running
        on this machine are left to it.
        """
        with self._lock:
            found = []
            for row in self.rows():
                if row.status == PENDING and row.node % nodes == self._node and not _is_running(row.sender):
                    taken = replace(row, sender=_this_process())
                    self._write(taken)
                    found.append(taken)
            return found

    def rows(self) -> Iterator[Row]:
        """All readable rows, oldest first. One that another version wrote may be unreadable, and is left out."""
        found = [row for path in self.folder.glob("*.json") if (row := _read(path)) is not None]
        yield from sorted(found, key=lambda row: row.event.time)

    def disable(self, endpoint: Endpoint, at: float) -> None:
        """No event of this run is sent to this endpoint any more. Raises OSError."""
        with self._lock:
            _replace(self._disabled_file, json.dumps({**self.disabled(), endpoint.id: {"endpoint": endpoint.name, "at": at}}))

    def disabled(self) -> Mapping[str, Mapping[str, object]]:
        """Disabled endpoints by id."""
        try:
            found: object = load_json(read_regular(self._disabled_file))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, row: Row) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / f"{row.event.id}.json", json.dumps(asdict(row)))
        self._rows[row.event.id] = row


def _read(path: Path) -> Row | None:
    try:
        values = cast(dict[str, object], load_json(read_regular(path)))
        deliveries = cast(dict[str, dict[str, object]], values["deliveries"])
        return Row(
            event=Event.from_json(cast(dict[str, object], values["event"])),
            deliveries={name: Delivery(**each) for name, each in deliveries.items()},  # type: ignore[arg-type]
            node=cast(int, values["node"]),
            sender=cast(dict[str, object], values["sender"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _replace(path: Path, text: str) -> None:
    """Written through to the disk: the next launch must find it after a power cut."""
    atomic_write(path, text.encode())


def _this_process() -> dict[str, object]:
    return asdict(Process.current())


def _is_running(sender: Mapping[str, object]) -> bool:
    """Whether a sender still runs on this machine. Of other machines it is not known."""
    try:
        process = Process(**sender)  # type: ignore[arg-type]
    except TypeError:
        return False
    return process != Process.current() and process.alive() is True
