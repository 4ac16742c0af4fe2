"""Torch's elastic rendezvous in the agent of a node: who is in a generation, who was lost, and who takes part in the next one.

torch decides which nodes form the group, and keeps them alive in it. Added to it:

- The store is kept by the host of the generation, a new one for each, so that the loss of any node is survived.
- The host gets rank 0 and the others follow by their machine rank; nodes above the usable number are spares.
- Clocks of nodes are not compared (torch does): a node is lost if its keep-alive does not change by this node's own clock.
- The nodes of the group watch each other (`smalti_cluster.nodes.node_watch`) once it is formed.
- At the end each node posts what it does next, and the host waits for those that still save.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from smalti import ExitCode
from smalti.system import (
    FOLDER_VARIABLE,
    load_json,
    preallocate,
    read_exit_reports,
    read_hooks,
    read_killed,
    read_lost_peers,
)
from smalti_cluster.elastic.messages import GENERATION_FILE, GroupEnd, Place
from smalti_cluster.elastic.policy import decide, fault_of_node
from smalti_cluster.elastic.waiting import WaitingNodes
from smalti_cluster.nodes.node_watch import begin_watch, end_watch

KEEP_ALIVE_SECONDS = 5
"""How often a node shows that it lives."""
LOST_SECONDS = 20.0
"""A node without a keep-alive for this long is lost, so within 30 s."""
STORE_SECONDS = 10
"""How long a request to the store may take."""
FORM_SECONDS = 60
"""How long a generation after the first one waits for the nodes that take part in it, which were all there just before."""
_POLL_SECONDS = 0.5
_HERE, _ENDED, _RANKS = "smalti/here/", "smalti/ended/", "smalti/machine/"


class KeepAlives:
    """When the keep-alive of each node last changed, by this node's own monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Any, tuple[object, float]] = {}

    def lost(self, heartbeats: dict[Any, object]) -> list[Any]:
        """The nodes whose keep-alive has not changed for `LOST_SECONDS`."""
        now = self._clock()
        for node, beat in heartbeats.items():
            if node not in self._seen or self._seen[node][0] != beat:
                self._seen[node] = beat, now
        return [node for node in heartbeats if now - self._seen[node][1] > LOST_SECONDS]


class GroupMember:
    """This node in its generation, for the life of an agent."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder = Path(os.environ[FOLDER_VARIABLE])
        self._end = GroupEnd()
        self._handler: Any = None
        self._local = 1
        self._trains = threading.Event()

    @property
    def _seconds(self) -> int:
        """How long the nodes of this generation wait for each other."""
        seconds = self._place.seconds
        return seconds if self._place.generation.number == 1 else min(seconds, FORM_SECONDS)

    # --- torch ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Let torch's launcher form this generation, whatever rendezvous it was called with."""
        import torch.distributed.launcher.api as api
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        dynamic: Any = dynamic_rendezvous
        dynamic.get_method_name = lambda depth=2: ""  # for its log: `inspect.stack` at each attempt to join
        launch = api.launch_agent

        def launch_in_generation(config: Any, *arguments: Any, **options: Any) -> Any:
            return launch(self._configured(config), *arguments, **options)

        api.launch_agent = launch_in_generation
        member, meet = self, dynamic.DynamicRendezvousHandler.next_rendezvous
        alive = KeepAlives()
        sanitize = dynamic._BackendRendezvousStateHolder._sanitize

        def remove_lost(holder: Any) -> None:
            """torch's own function, with keep-alives of lost nodes made old and all others new."""
            state = holder._state
            beats = dict(state.last_heartbeats)
            gone = set(alive.lost(beats))
            now = dynamic.datetime.now(dynamic.timezone.utc)
            state.last_heartbeats = {node: now - timedelta(days=1) if node in gone else now for node in beats}
            sanitize(holder)
            state.last_heartbeats = {node: beats[node] for node in state.last_heartbeats}

        dynamic._BackendRendezvousStateHolder._sanitize = remove_lost
        dynamic.DynamicRendezvousHandler.next_rendezvous = lambda handler: member._meet(handler, meet)
        dynamic.DynamicRendezvousHandler.num_nodes_waiting = lambda handler: 0
        shutdown = dynamic.DynamicRendezvousHandler.shutdown

        def shut_down_soon(handler: Any) -> bool:
            """It waits for the store, which may be on a node that is lost."""
            if _host_is_lost():
                return False
            thread = threading.Thread(target=shutdown, args=(handler,), daemon=True)
            thread.start()
            thread.join(STORE_SECONDS)
            return not thread.is_alive()

        dynamic.DynamicRendezvousHandler.shutdown = shut_down_soon

    def _configured(self, config: Any) -> Any:
        generation, self._local = self._place.generation, config.nproc_per_node
        return replace(
            config,
            min_nodes=generation.present,
            max_nodes=generation.present,
            run_id=generation.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{generation.address}:{generation.port}",
            rdzv_configs={
                "is_host": self._place.is_host,
                "join_timeout": self._seconds,
                "last_call_timeout": 1,
                "keep_alive_interval": KEEP_ALIVE_SECONDS,
                "read_timeout": STORE_SECONDS if self._place.is_host else self._seconds,
            },
            max_restarts=0,
            local_addr=self._place.address,
        )

    def _meet(self, handler: Any, meet: Callable[[Any], Any]) -> Any:
        """The rendezvous of this node. Ends the process if it is a spare, or if the group is not formed."""
        from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousInfo, RendezvousStoreInfo

        self._handler, place = handler, self._place
        try:
            if place.late:
                self._show_waiting()
            if place.machine_rank not in place.generation.members:
                _wait_until_formed(handler)
            handler._store.set(f"{_HERE}{place.machine_rank}", repr(handler._this_node))
            found = meet(handler)
            store = found.store
            store.set(f"{_RANKS}{found.rank}", str(place.machine_rank))
            machines = [int(value) for value in store.multi_get([f"{_RANKS}{rank}" for rank in range(found.world_size)])]
        except (RendezvousError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].strip() or type(error).__name__
            self._end = replace(self._end, error=f"generation {place.generation.number} was not formed: {reason}")
            sys.exit(int(ExitCode.KILLED))
        used = place.generation.used
        order = sorted(machines, key=lambda machine: (machine != place.generation.host, machine))
        rank = order.index(place.machine_rank)
        if rank >= used:
            self._wait_as_spare()
        self._trains.set()
        self._end = replace(self._end, first_rank=rank * self._local, count=self._local)
        preallocate(self._folder, self._end.ranks)
        begin_watch(handler._store, rank, min(used, found.world_size))
        return RendezvousInfo(
            store, rank, min(used, found.world_size), RendezvousStoreInfo(place.generation.address, place.generation.port)
        )

    def _show_waiting(self) -> None:
        """Let the main rank know that this node waits, as long as no ranks start here."""
        waiting = WaitingNodes(Path(self._place.directory, GENERATION_FILE).parent)

        def show() -> None:
            while not self._trains.wait(_POLL_SECONDS):
                waiting.show(self._place.machine_rank)

        threading.Thread(target=show, name="smalti-waiting", daemon=True).start()

    def _wait_as_spare(self) -> None:
        """Until the generation is over. Ends the process."""
        print("smalti: this node is a spare: it waits until it can take the place of another", file=sys.stderr, flush=True)
        self._show_waiting()
        with suppress(Exception):  # then the store is gone, and with it the host
            while not self._handler.is_closed():
                time.sleep(_POLL_SECONDS)
        sys.exit(0)

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, status: int) -> None:
        """Post what this node does next, once its ranks have ended. On the host: wait until all others have."""
        from smalti.launch import summarize_exits

        end_watch()
        folder, end, place = self._folder, self._end, self._place
        message, code = end.error, ExitCode.KILLED
        if end.count:
            reports = read_exit_reports(folder)
            code, message = summarize_exits(reports, status, end.ranks, read_killed(folder), read_hooks(folder, end.ranks))
        faulty = fault_of_node(Path(place.directory), end.ranks, place.begun) is not None
        self._end = replace(end, decision=decide(code, message, faulty=faulty, alone=place.most == 1))
        if self._handler is not None:
            post = {"decision": self._end.decision, "code": int(code), "message": message, "name": place.name}
            self._post(json.dumps(post))
            if place.is_host and self._end.decision != "end":
                with suppress(Exception):
                    self._collect()
        self._end.write(place.end)

    def _post(self, text: str) -> None:
        """Write to the store, for `STORE_SECONDS` at most: if the link to the host is cut, torch waits for much longer."""
        if _host_is_lost():
            return

        def post() -> None:
            with suppress(Exception):  # the host is gone
                self._handler._store.set(f"{_ENDED}{self._place.machine_rank}", text)

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)

    def _collect(self) -> None:
        """On the host: wait until every other node has posted what it does, or is lost."""
        store, holder, machines = self._handler._store, self._handler._state_holder, range(self._place.most)
        here = {machine: store.get(f"{_HERE}{machine}").decode() for machine in machines if store.check([f"{_HERE}{machine}"])}
        if self._end.error and (absent := [f"node {each}" for each in self._place.generation.members if each not in here]):
            formed = f"generation {self._place.generation.number} was not formed"
            self._end = replace(self._end, error=f"{formed}: {', '.join(absent)} did not come within {self._seconds} s")
        lost: set[int] = set()
        posts: dict[int, dict[str, Any]] = {}
        while waiting := here.keys() - posts.keys() - lost:
            posts |= {each: load_json(store.get(f"{_ENDED}{each}")) for each in waiting if store.check([f"{_ENDED}{each}"])}
            holder.sync()
            state = holder.state
            alive = {repr(node) for node in (*state.participants, *state.wait_list, *state.redundancy_list)}
            lost |= {each for each in here.keys() - posts.keys() if here[each] not in alive}
            time.sleep(_POLL_SECONDS)
        ends = [post for post in posts.values() if post["decision"] == "end"]
        self._end = replace(
            self._end,
            again=tuple(sorted(each for each, post in posts.items() if post["decision"] == "again")),
            left=tuple(f"{post['name']}: {post['message']}" for post in posts.values() if post["decision"] == "leave"),
            lost=tuple(f"node {each}" for each in sorted(lost)),
            end=(cast(int, ends[0]["code"]), cast(str, ends[0]["message"])) if ends else None,
        )


def _wait_until_formed(handler: Any) -> None:
    """A node that is no member would take the place of one that is still to come."""
    holder = handler._state_holder
    while not (holder.state.complete or holder.state.closed):
        time.sleep(_POLL_SECONDS)
        holder.sync()


def _host_is_lost() -> bool:
    """Whether this node knows that the one with the store is gone; it has rank 0."""
    return 0 in read_lost_peers().nodes
