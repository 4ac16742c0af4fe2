"""The TCP service on node 0 through which the nodes exchange what they have before a launch, or for `smalti doctor --nodes`.

It listens on the port that torch's rendezvous uses later, so that this port is checked too. `close` releases it.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from smalti import Finding, PreflightError
from smalti_cluster.checks.agent import PROTOCOL, Actions, Identity
from smalti_cluster.checks.channel import Channel, Message
from smalti_cluster.checks.storage import mount_of, remove_all

_HANDSHAKE_SECONDS = 60.0
_HELLO_SECONDS = 10.0
_NOT_SHARED = "give an --output_dir on storage that all nodes mount at the same place, or --no_shared_output_dir with a mirror"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a node has answered. `error` is why there is no answer. `arrived` is a time of the monotonic clock of node 0."""

    answer: Message
    arrived: float
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node that has connected. `address` is that by which others reach it."""

    identity: Identity
    address: str
    channel: Channel


class Service:
    """Accepts the other nodes in a thread; `request` and `end` are for one thread.

    Node 0 makes a folder of its own where all nodes share one (`Actions.folder`). Raises PreflightError if the port cannot be
    used, OSError if the folder cannot be made.
    """

    def __init__(self, own: Identity, actions: Actions, *, address: str, port: int) -> None:
        self.own = own
        self.port = port
        self.token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._problems: dict[int, Finding] = {}
        self._members: dict[int, Member] = {}
        self._handshakes: set[Channel] = set()
        self._requests = 0
        self._socket = _listen(port)
        self.folder = None if actions.folder is None else actions.folder / f".nodes-{self.token}"
        """Where the nodes write files for each other; None if they share nothing."""
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True)
            except OSError:
                self._socket.close()
                raise
        self._mount = f"{actions.output_dir} on {mount_of(actions.output_dir)}"
        here, there = socket.socketpair()
        self._members[0] = Member(identity=own, address=address, channel=Channel(here))
        self._threads = [
            threading.Thread(target=_serve_here, args=(actions, Channel(there)), name="nodes-agent", daemon=True),
            threading.Thread(target=self._accept, name="nodes-service", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def members(self) -> dict[int, Member]:
        """The nodes that take part, by number, with node 0."""
        with self._lock:
            return dict(self._members)

    def problems(self) -> list[Finding]:
        """Why nodes were refused that have connected."""
        with self._lock:
            return list(self._problems.values())

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(
        self,
        kind: str,
        arguments: Mapping[str, object] | None = None,
        *,
        seconds: float,
        each: Mapping[int, Mapping[str, object]] | None = None,
        of: Iterable[int] | None = None,
    ) -> dict[int, Reply]:
        """Send a request to all nodes, or to those `of`, and wait for the answers for at most this long.

        `arguments` are for all of them; `each` has more for a node by its number, and selects the nodes.
        """
        self._requests += 1
        members, replies = self.members(), {}
        waiting: dict[int, tuple[int, Member]] = {}
        for rank in sorted(of if of is not None else each if each is not None else members):
            own = {**(arguments or {}), **((each or {}).get(rank) or {})}
            try:
                members[rank].channel.send({"request": kind, "id": self._requests, "arguments": own})
                waiting[members[rank].channel.fileno()] = (rank, members[rank])
            except (OSError, KeyError) as error:
                replies[rank] = Reply(answer={}, arrived=time.monotonic(), error=_lost(error))
        poll, deadline = select.poll(), time.monotonic() + seconds
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(min(left, 1.0) * 1000):
                rank, member = waiting[number]
                if (reply := self._read(member.channel)) is not None:
                    replies[rank] = reply
                    poll.unregister(number)
                    del waiting[number]
        for rank, _ in waiting.values():
            replies[rank] = Reply(answer={}, arrived=time.monotonic(), error=f"no answer within {seconds:.0f} s")
        return dict(sorted(replies.items()))

    def _read(self, channel: Channel) -> Reply | None:
        """The reply to the latest request, if it is complete; older ones that came too late are skipped."""
        try:
            channel.read()
            while (message := channel.take()) is not None:
                if message.get("id") == self._requests:
                    return Reply(answer=message, arrived=time.monotonic(), error=str(message.get("error") or ""))
        except OSError as error:
            return Reply(answer={}, arrived=time.monotonic(), error=_lost(error))
        return None

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, result: Message) -> None:
        """Release the port, then let the nodes end with this result."""
        self._stop_listening()
        for member in self.members().values():
            with suppress(OSError):
                member.channel.send({"request": "end", "id": 0, "arguments": result})
        self.close()

    def close(self) -> None:
        """Release the port, close all connections and remove the folder. May be called again."""
        self._stop_listening()
        with self._lock:
            channels = [*self._handshakes, *(member.channel for rank, member in self._members.items() if rank > 0)]
            local = self._members[0].channel
        for channel in (*channels, local):
            channel.close()
        if self.folder is not None:
            remove_all(self.folder)
            with suppress(OSError):
                self.folder.rmdir()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            channel = Channel(connection)
            with self._lock:
                self._handshakes.add(channel)
            threading.Thread(target=self._welcome, args=(channel,), name="nodes-handshake", daemon=True).start()

    def _welcome(self, channel: Channel) -> None:
        kept = False
        try:
            kept = self._handshake(channel)
        except (OSError, KeyError, TypeError, ValueError):
            pass  # it has gone, or is another program: a node tries again
        finally:
            with self._lock:
                self._handshakes.discard(channel)
            if not kept:
                channel.close()

    def _handshake(self, channel: Channel) -> bool:
        """Whether the node takes part."""
        hello = channel.receive(_HELLO_SECONDS)
        node = Identity(
            machine_rank=int(str(hello["machine_rank"])),
            num_machines=int(str(hello["num_machines"])),
            host=str(hello["host"]),
            version=str(hello["version"]),
        )
        problem = self._mismatch(node, hello)
        if problem is None:
            channel.send({"folder": self.folder.name if self.folder is not None else ""})
            answer = channel.receive(_HANDSHAKE_SECONDS)
            if not answer["sees"]:
                places = f"{answer['output_dir']} on {node.name}, {self._mount} on {self.own.name}"
                message = f"output_dir is not one directory: {places}"
                problem = Finding(check="output_dir", level="error", message=message, fix=_NOT_SHARED, node=node.name)
        with self._lock:
            problem = problem or self._duplicate(node)
            if problem is not None:
                self._problems[node.machine_rank] = problem
            else:
                self._problems.pop(node.machine_rank, None)
                if (ended := self._members.get(node.machine_rank)) is not None:
                    ended.channel.close()
                self._members[node.machine_rank] = Member(identity=node, address=channel.peer, channel=channel)
        if problem is not None:
            channel.send({"refused": {"check": problem.check, "message": problem.message, "fix": problem.fix}})
            return False
        channel.send({})
        return True

    def _mismatch(self, node: Identity, hello: Message) -> Finding | None:
        own, message, fix = self.own, "", ""
        if node.version != own.version or hello["smalti-nodes"] != PROTOCOL:
            message = f"smalti is {node.version} on {node.name} and {own.version} on {own.name}"
            return Finding(
                check="smalti", level="error", message=message, fix="install the same version on all nodes", node=node.name
            )
        if node.num_machines != own.num_machines:
            message = f"num_machines is {node.num_machines} on {node.name} and {own.num_machines} on {own.name}"
            fix = "give the same --num_machines on all nodes"
        elif not 0 < node.machine_rank < own.num_machines:
            message = f"{node.name} has connected to {own.name}, which has --machine_rank=0"
            fix = f"give each node its own --machine_rank, from 0 to {own.num_machines - 1}"
        if not message:
            return None
        return Finding(check="nodes", level="error", message=message, fix=fix, node=node.name)

    def _duplicate(self, node: Identity) -> Finding | None:
        """A node may come again after its process was ended, but two may not have the same number."""
        other = self._members.get(node.machine_rank)
        if other is None or not other.channel.is_open():
            return None
        message = f"--machine_rank={node.machine_rank} is given on {other.identity.host} and on {node.host}"
        fix = f"give each node its own --machine_rank, from 0 to {self.own.num_machines - 1}"
        return Finding(check="nodes", level="error", message=message, fix=fix, node=node.name)


def _serve_here(actions: Actions, channel: Channel) -> None:
    """Node 0 answers its own requests like the other nodes."""
    with suppress(OSError):
        actions.serve(channel)
    channel.close()


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            with suppress(OSError):  # IPv6 may be disabled; the other attempt gives the reason
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        message = f"port {port} of this node cannot be used: {error.strerror}"
        raise PreflightError(message, fix="--main_process_port=ANOTHER, the same on all nodes") from error


def _lost(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "it has not connected"
    return f"the connection was lost: {cast(OSError, error).strerror or error}"


def gather_nodes(
    service: Service, seconds: float, waiting: Callable[[float, list[int]], None], check: Callable[[], None] = lambda: None
) -> list[int]:
    """Wait until all nodes have connected, or one was refused. Returns the numbers of those that have not after this time.

    `waiting` is called with the seconds so far and the missing nodes, `check` too; either may raise.
    """
    begun = time.monotonic()
    while True:
        check()
        missing = sorted(set(range(service.own.num_machines)) - service.members().keys())
        waited = time.monotonic() - begun
        if not missing or service.problems() or waited > seconds:
            return missing
        waiting(waited, missing)
        time.sleep(0.1)
