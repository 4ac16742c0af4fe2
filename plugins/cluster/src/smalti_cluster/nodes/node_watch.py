"""Agents of a launch with several nodes watch each other, so that a lost node ends the run within half a minute.

Each agent publishes a number that changes every second in the store of the rendezvous. A node whose number does not change for
`--node_timeout` is lost; for the other nodes so is node 0, which has the store, if the store does not answer for that long. The
ranks of the node read it in a file (`smalti.system.liveness`) and leave, after an emergency save where that is possible.

In the agents, because they compute nothing: a rank that holds Python's lock for long would seem lost. In the store, because
training needs that connection in any case: no other port, and no shared file system. Times are of the own monotonic clock.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from smalti.system import LostPeers, load_json, write_lost_peers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

TIMEOUT_VARIABLE = "SMALTI_NODE_TIMEOUT"
"""The environment variable with the option `--node_timeout`, in seconds."""
FIX = "check that node and its network; --node_timeout says how long it may be silent"
_SECONDS = 1.0
_PAUSE_SECONDS = 5.0
"""After this time without running, this process was stopped itself, and has to begin to watch anew."""


def watch_nodes() -> None:
    """Let the agent of this process begin to watch when it has met the others by a static rendezvous."""
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    meet = StaticTCPRendezvous.next_rendezvous

    def meet_and_watch(self: StaticTCPRendezvous) -> RendezvousInfo:
        met = meet(self)
        begin_watch(met.store, met.rank, met.world_size)
        return met

    StaticTCPRendezvous.next_rendezvous = meet_and_watch  # type: ignore[method-assign]


def begin_watch(store: Store, node: int, nodes: int) -> None:
    """Watch the other nodes from now on, as node `node` out of `nodes`. Node 0 has the store."""
    global _watch
    timeout = float(os.environ.get(TIMEOUT_VARIABLE, "0"))
    if timeout > 0 and nodes > 1:
        _watch = NodeWatch(store, node, nodes, timeout)
        _watch.start()


def end_watch() -> None:
    """The ranks of this node have ended: other nodes may end too."""
    if _watch is not None:
        _watch.ended.set()


def note_killed(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Let other nodes know which ranks of this one were killed by a signal: they cannot tell it themselves."""
    killed = {rank: -code for rank, process in ranks.items() if (code := process.poll()) is not None and code < 0}
    if _watch is not None and killed:
        _watch.publish_killed({rank: signal.Signals(number).name for rank, number in killed.items()})


class NodeWatch:
    """Of node `node` out of `nodes`. `timeout` and `interval` are in seconds."""

    def __init__(self, store: Store, node: int, nodes: int, timeout: float, *, interval: float = _SECONDS) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        own = store.clone()  # type: ignore[attr-defined]  # a connection that may block
        self._store = PrefixStore("smalti/nodes", own)
        self._node = node
        self._others = [other for other in range(nodes) if other != node]
        self._timeout = timeout
        self._interval = interval
        self._killed: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._signs: dict[int, tuple[int, float]] = {}
        self._answered = time.monotonic()
        self._reported = LostPeers()
        self._lock = threading.Lock()
        self._at_once = threading.Event()
        self.ended = threading.Event()
        """The store has ended, as when the agent of node 0 has: the ranks notice that by themselves."""

    def start(self) -> None:
        for work in (self._exchange, self._check):
            threading.Thread(target=work, name="smalti-nodes", daemon=True).start()

    def publish_killed(self, killed: Mapping[int, str]) -> None:
        self._killed = dict(killed)
        self._at_once.set()

    def _exchange(self) -> None:
        """Publish and read, which blocks for as long as the store does not answer."""
        number = 0
        try:
            while not self.ended.is_set():
                number += 1
                mine = {"number": number, "host": socket.gethostname(), "killed": self._killed}
                self._store.set(str(self._node), json.dumps(mine))
                self._read()
                self._at_once.wait(self._interval)
                self._at_once.clear()
        except RuntimeError:
            self.ended.set()

    def _read(self) -> None:
        killed: dict[int, str] = {}
        there = [other for other in self._others if self._store.check([str(other)])]
        for other, text in zip(there, self._store.multi_get([str(each) for each in there]) if there else (), strict=True):
            sign = load_json(text)
            with self._lock:
                self._hosts[other] = sign["host"]
                if self._signs.get(other, (0, 0.0))[0] != sign["number"]:
                    self._signs[other] = (sign["number"], time.monotonic())
            killed |= {int(rank): f"was killed by {name} on {sign['host']}" for rank, name in sign["killed"].items()}
        self._answered = time.monotonic()
        self._report({}, killed)

    def _check(self) -> None:
        looked = time.monotonic()
        while not self.ended.wait(self._interval):
            now = time.monotonic()
            if now - looked > _PAUSE_SECONDS:
                with self._lock:
                    self._answered = now
                    self._signs = {node: (number, now) for node, (number, _) in self._signs.items()}
            looked = now
            for node in self._silent(now):
                self._report({node: f"{self._name(node)} has shown no sign of life for {self._timeout:.0f} s"}, {})

    def _silent(self, now: float) -> list[int]:
        """The nodes that are lost. Nothing is known of others than node 0 while the store does not answer."""
        if now - self._answered > self._timeout and self._node != 0:
            return [0]
        if now - self._answered > _PAUSE_SECONDS:
            return []
        with self._lock:
            return [node for node, (_, changed) in self._signs.items() if now - changed > self._timeout]

    def _report(self, nodes: Mapping[int, str], ranks: Mapping[int, str]) -> None:
        """Add what is new. A node that was lost stays lost: the ranks are leaving."""
        with self._lock:
            new = [why for node, why in nodes.items() if node not in self._reported.nodes]
            if not new and ranks.keys() <= self._reported.ranks.keys():
                return
            self._reported = LostPeers(
                nodes={**nodes, **self._reported.nodes}, ranks={**ranks, **self._reported.ranks}, fix=FIX
            )
            write_lost_peers(self._reported)
        for why in new:
            print(f"smalti: {why}", file=sys.stderr, flush=True)

    def _name(self, node: int) -> str:
        return f"node {node}{f' ({self._hosts[node]})' if node in self._hosts else ''}"


_watch: NodeWatch | None = None
