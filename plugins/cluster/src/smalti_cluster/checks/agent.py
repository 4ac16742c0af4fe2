"""A node as seen by node 0: it connects to node 0 and executes what node 0 requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from smalti_cluster.checks.channel import Channel, Message
from smalti_cluster.checks.peers import PeerPort, Peers, connect_all, transfer
from smalti_cluster.checks.storage import missing_files, mount_of, publish, remove_all, sees, write_draft

PROTOCOL = 1
"""Nodes exchange messages only with the same number."""
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which node this is, of how many, and what is needed to exchange anything with it."""

    machine_rank: int
    num_machines: int
    host: str
    version: str

    @property
    def name(self) -> str:
        return f"node {self.machine_rank} ({self.host})"


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What a node does on request of node 0.

    `folder` is in `output_dir`, and where this node expects what all nodes share; None if they share nothing. `facts` returns
    what this node has.
    `measure` returns the speed of its devices; it may take as many seconds for each of them.
    """

    output_dir: Path
    folder: Path | None
    facts: Callable[[], Message]
    measure: Callable[[float], Message]

    def serve(self, channel: Channel) -> Message:
        """Execute requests until node 0 ends the exchange. Returns what it ended with. Raises OSError."""
        port: PeerPort | None = None
        try:
            while True:
                message = channel.receive()
                kind, arguments = str(message["request"]), cast(Message, message.get("arguments") or {})
                if kind == "end":
                    return arguments
                if kind == "listen":
                    port = port or PeerPort(str(arguments["token"]))
                    answer: Message = {"port": port.port}
                else:
                    answer = self._answer(kind, arguments)
                channel.send({"id": message["id"], **answer})
        finally:
            if port is not None:
                port.close()

    def _answer(self, kind: str, arguments: Message) -> Message:
        try:
            return self._execute(kind, arguments)
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            return {"error": f"{error.strerror or error}{place}"}

    def _execute(self, kind: str, arguments: Message) -> Message:
        match kind:
            case "clock":
                return {"time": time.time()}
            case "facts":
                return self.facts()
            case "draft":
                write_draft(self._shared(arguments), str(arguments["name"]), cast(list[str], arguments["names"]))
            case "publish":
                publish(self._shared(arguments), str(arguments["name"]))
            case "watch":
                names, seconds = cast(list[str], arguments["names"]), cast(float, arguments["seconds"])
                return {"missing": missing_files(self._shared(arguments), names, seconds)}
            case "clear":
                return {"failed": remove_all(self._shared(arguments))}
            case "connect":
                return {"failed": connect_all(cast(Peers, arguments["peers"]), str(arguments["token"]))}
            case "transfer":
                host, port = cast(tuple[str, int], arguments["peer"])
                sent, received = transfer(host, port, str(arguments["token"]), cast(float, arguments["seconds"]))
                return {"sent": sent, "received": received}
            case "measure":
                return self.measure(cast(float, arguments["seconds"]))
            case _:
                return {"error": f"unknown request {kind!r}"}
        return {}

    def _shared(self, arguments: Message) -> Path:
        if self.folder is None:
            raise OSError("this node has --no_shared_output_dir")
        return self.folder / Path(str(arguments["folder"])).name

    def sees(self, name: str) -> bool:
        """Whether this node sees a folder of node 0 with this name."""
        return self.folder is None or not name or sees(self.folder / Path(name).name)


class Agent:
    """Connects this node to node 0, in a thread of its own, as often as needed until `close`.

    `unreachable` is why it cannot connect now, with the time of the monotonic clock since when; None if it has connected.
    `refused` is why it does not take part, `ended` what node 0 has ended the exchange with, `failure` an unexpected error.
    """

    def __init__(self, own: Identity, actions: Actions, address: str, port: int) -> None:
        self.unreachable: tuple[str, float] | None = None
        self.refused: Message | None = None
        self.ended: Message | None = None
        self.failure: Exception | None = None
        self.connected = False
        self._own, self._actions = own, actions
        self._address, self._port = address, port
        self._channel: Channel | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._channel is not None:
            self._channel.close()
        self._thread.join(_CONNECT_SECONDS)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set() and self.refused is None and self.ended is None:
            try:
                self._connect()
            except OSError as error:
                since = self.unreachable[1] if self.unreachable else time.monotonic()
                self.unreachable = (error.strerror or str(error), since)
            except Exception as error:  # noqa: BLE001 - for the main thread, which waits
                self.failure = error
                return
            self.connected = False
            self._closing.wait(_RETRY_SECONDS)

    def _connect(self) -> None:
        connection = socket.create_connection((self._address, self._port), _CONNECT_SECONDS)
        self._channel = channel = Channel(connection)
        try:
            own = self._own
            channel.send(
                {
                    "smalti-nodes": PROTOCOL,
                    "machine_rank": own.machine_rank,
                    "num_machines": own.num_machines,
                    "host": own.host,
                    "version": own.version,
                }
            )
            welcome = channel.receive(_HANDSHAKE_SECONDS)
            if "refused" not in welcome:
                place = f"{self._actions.output_dir} on {mount_of(self._actions.output_dir)}"
                channel.send({"sees": self._actions.sees(str(welcome["folder"])), "output_dir": place})
                welcome = channel.receive(_HANDSHAKE_SECONDS)
            if "refused" in welcome:
                self.refused = welcome
                return
            self.unreachable, self.connected = None, True
            self.ended = self._actions.serve(channel)
        finally:
            channel.close()
