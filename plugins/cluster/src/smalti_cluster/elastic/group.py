"""The generations of a run: each is one launch of the ranks on the nodes that are there, until none starts again.

    nodes/generation.json   the current generation: who is the host, where its store is, how many nodes meet
    nodes/waiting-RANK      written again and again by a node that waits for the next one, see `waiting`

The launcher that owns the run directory is the host. It writes the file when all others have said at the end of a generation
whether they go on (`smalti_cluster.elastic.rendezvous`). If the host is lost or leaves, the next launcher that acquires the run
directory is, and counts those that wait with it. So no node is needed for the run to continue.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from smalti import ExitCode, InUseError, UserError
from smalti.config import Config, LaunchOptions, RunOptions, TrainingOptions
from smalti.launch import (
    CHOSEN_VARIABLE,
    DEFAULT_PORT,
    Ended,
    LaunchPlan,
    LaunchResult,
    StandbyLauncher,
    received_signals,
    run_workers,
    yaml_text,
)
from smalti.rundir import ENDINGS, POLL_SECONDS, STALE_SECONDS, STOPPED_EARLY, RunDirectory, RunWriter
from smalti.system import atomic_write, write_json_atomically
from smalti_cluster.elastic.excluded import exclude
from smalti_cluster.elastic.messages import (
    GENERATION_FILE,
    Generation,
    GroupEnd,
    Place,
    grows,
    read_generation,
    read_group_end,
)
from smalti_cluster.elastic.policy import decide, fault_of_node
from smalti_cluster.elastic.sizes import Sizes
from smalti_cluster.elastic.waiting import WaitingNodes
from smalti_cluster.nodes.network import route_to
from smalti_cluster.nodes.node_0 import LaunchOfNode0
from smalti_cluster.options import ClusterOptions, node_range

_TURN_SECONDS = 0.5
"""Nodes try one after another to become the host, so that two seldom meet."""
_BEAT_SECONDS = 1.0
"""How often the heartbeat of the host is read."""
_STOPPED = "stopped while the group of nodes was formed; saved checkpoints are intact"
_REQUESTED: Mapping[object, ExitCode] = {"interrupted": ExitCode.INTERRUPTED, "preempted": ExitCode.PREEMPTED}
"""With what a group ends that a signal to one of its nodes has stopped while no ranks trained."""
_SAVE_SECONDS = 30.0
"""A checkpoint that is being saved by a rank of the last generation is waited for, as long as it grows within this time."""


class Group:
    """A launch on this node through all generations. `writer` is to be set while this node owns the run directory."""

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        directory: RunDirectory,
        plan: Callable[[Config], LaunchPlan],
        acquire: Callable[[], RunWriter],
    ) -> None:
        self.writer: RunWriter | None = None
        self.notices = sizes.notices()
        self._config = config
        self._options = config[LaunchOptions]
        self._sizes = sizes
        self._directory = directory
        self._plan = plan
        self._acquire = acquire
        self._file = directory.path / GENERATION_FILE
        self._cluster, self._most = config[ClusterOptions], node_range(config)[1]
        self._several = self._most > 1
        self._received: list[int] = []
        self._late = False

    def run(
        self, members: tuple[int, ...], attempt: float | None, standby: StandbyLauncher | None, *, late: bool = False
    ) -> LaunchResult:
        """Run to the end of the last generation. The nodes `members` start, `attempt` is that of the first host.

        `late`: the group trains already, and this node is a spare until it starts again.
        """
        self._late = late
        with received_signals() as self._received:
            found = self._first(members) if self.writer is not None else self._next_of_host(attempt)
            while isinstance(found, Generation):
                begun = time.time()
                ended, group = self._run(found, begun, standby)
                found, standby = self._after(found, ended, group, begun), None
                self._late = False
        return found

    # --- one generation ---------------------------------------------------------------------------------------------

    def _run(self, generation: Generation, begun: float, standby: StandbyLauncher | None) -> tuple[Ended, GroupEnd | None]:
        config = self._sizes.configs[generation.used]
        self._late = self._late or self._options.machine_rank not in generation.members
        plan = self._plan(config)
        if plan.accelerate_file is not None:
            atomic_write(plan.accelerate_file, yaml_text(plan.accelerate).encode())
        self._announce(generation, config)
        variables = {**plan.variables, CHOSEN_VARIABLE: json.dumps(self._chosen(generation, config))}
        with tempfile.TemporaryDirectory(prefix="smalti-group-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "end.json")
            if self._several:
                variables |= self._place(generation, begun, file).variables()
                plan = replace(plan, ranks=range(0))  # which the agent learns
            ended = run_workers(
                replace(plan, variables=variables),
                self._directory,
                self._received,
                digest=self._config.digest,
                writer=self.writer,
                standby=standby,
                ended_elsewhere=self._watch_host(generation) if self.writer is None else lambda: None,
            )
            return ended, read_group_end(file)

    def _watch_host(self, generation: Generation) -> Callable[[], LaunchResult | None]:
        """What `run_workers` asks for on a node that is not the host. How long the host is silent is counted from now on."""
        node_0, looked = LaunchOfNode0(self._directory, generation.attempt), time.monotonic()

        def stopped_early() -> LaunchResult | None:
            nonlocal looked
            if time.monotonic() - looked > _BEAT_SECONDS:
                self._directory.watch_heartbeat()
                looked = time.monotonic()
            return node_0.stopped_early()

        return stopped_early

    def _place(self, generation: Generation, begun: float, file: Path) -> Place:
        return Place(
            generation=generation,
            machine_rank=self._options.machine_rank,
            name=f"node {self._options.machine_rank} ({socket.gethostname()})",
            address=self._address(),
            most=self._most,
            seconds=self._cluster.rendezvous_timeout,
            directory=str(self._directory.path),
            begun=begun,
            end=str(file),
            late=self._late,
            sizes=tuple(sorted(self._sizes.configs)),
            grow_after=self._cluster.grow_after,
        )

    def _chosen(self, generation: Generation, config: Config) -> dict[str, tuple[object, str]]:
        """The values that the ranks of a generation use in place of the configured ones, each with the reason."""
        found: dict[str, tuple[object, str]] = {}
        for name in ("num_processes", "num_machines", "gradient_accumulation_steps"):
            if config.value(name) != self._config.value(name):
                found[name] = config.value(name), f"{_nodes(generation.used)} of {self._cluster.nodes or self._most}"
        if resume := self._resume_from(generation):
            found["resume_from_checkpoint"] = resume, "the newest of this launch"
        return found

    def _announce(self, generation: Generation, config: Config) -> None:
        """Print what the generation is, but for the first one of all nodes; the host writes an event."""
        if self._late:
            print(f"smalti: {self._as_spare(generation)}", file=sys.stderr, flush=True)
            return
        launch, accumulation = config[LaunchOptions], config[TrainingOptions].gradient_accumulation_steps
        step = self._newest_step()
        where = f"{_nodes(generation.used)} of {generation.present}" if self._several else "this node"
        ranks = "1 rank" if launch.num_processes == 1 else f"{launch.num_processes} ranks"
        batch = f"{ranks}, gradient_accumulation_steps={accumulation}, from step {step}"
        line = "; ".join(filter(None, (f"generation {generation.number}: {where}, {batch}", generation.message)))
        if generation.number > 1 or generation.used < self._options.num_machines:
            print(f"smalti: {line}", file=sys.stderr, flush=True)
        if self.writer is not None:
            self.writer.events.append(
                "generation",
                step=step or None,
                generation=generation.number,
                nodes=generation.used,
                spares=generation.present - generation.used,
                world_size=launch.num_processes,
                accumulation=accumulation,
                reason=generation.message,
                message=line,
            )

    def _as_spare(self, generation: Generation) -> str:
        """What a node waits for that has come while the group trains."""
        after = self._cluster.grow_after
        until = "a node is lost (with --grow_after=30m, the group would start again for this one)"
        if after is not None:
            until = f"a node is lost, or this generation has trained for {after} s (--grow_after) and can use more nodes"
        group = f"generation {generation.number} trains without it, on {_nodes(generation.used)}"
        return f"this node is a spare: {group}. It waits until {until}"

    def _resume_from(self, generation: Generation) -> str:
        """The checkpoint with which a later generation begins: the newest of this launch. "" for that of the options."""
        if generation.number == 1 or self._config[RunOptions].resume_from_checkpoint == "latest":
            return ""
        new = [name for name in self._checkpoints() if name not in generation.checkpoints]
        return str(self._directory.checkpoints / new[-1]) if new else ""

    # --- after it ---------------------------------------------------------------------------------------------------

    def _after(self, generation: Generation, ended: Ended, group: GroupEnd | None, begun: float) -> Generation | LaunchResult:
        """The next generation, or the result of this node."""
        code, message = ended.code, ended.message
        if ended.final:
            request = self.writer.stop_request if self.writer is not None else None
            again = generation.number > 1 and message == STOPPED_EARLY
            return _REQUESTED.get(request and request.details.get("reason"), code), _STOPPED if again else message
        if group is not None and group.end is not None:
            return ExitCode(group.end[0]), group.end[1]
        if group is not None and not group.count:
            code, message = ExitCode.KILLED, group.error or "this node was a spare"
        fault = fault_of_node(self._directory.path, ended.ranks, begun)
        decision = group.decision if group is not None else decide(code, faulty=fault is not None, alone=not self._several)
        if self._received and grows(code, message):
            interrupted = self._received[0] == signal.SIGINT
            return ExitCode.INTERRUPTED if interrupted else ExitCode.PREEMPTED, _STOPPED
        if decision == "end" or self._received:
            return code, message
        if decision == "leave":
            exclude(self._directory.path, self._options.machine_rank, fault)
            self._hand_over(generation, group)
            return code, f"{message}\n  this node has left the group; the others continue without it"
        if self.writer is None:
            return self._next_of_host(generation.attempt, generation)
        members = generation.members if group is None or group.again is None else group.again
        return self._next(generation, members, code, _reason(group, message))

    def _hand_over(self, generation: Generation, group: GroupEnd | None) -> None:
        """Let another node become the host."""
        if self.writer is None:
            return
        others = tuple(each for each in generation.members if each != self._options.machine_rank)
        members = group.again if group is not None and group.again is not None else others
        self._write(replace(generation, handed_over=True, members=members))
        self.writer.close()
        self.writer = None

    def _first(self, members: tuple[int, ...]) -> Generation | LaunchResult:
        names = tuple(self._checkpoints()) if self._config[RunOptions].resume_from_checkpoint != "latest" else ()
        first = Generation(
            number=1, attempt=0.0, host=0, address="", port=0, members=members, used=0, checkpoints=names, step=self._step()
        )
        return self._formed(first, ExitCode.PREFLIGHT, "")

    def _next(self, last: Generation, members: tuple[int, ...], code: ExitCode, message: str) -> Generation | LaunchResult:
        """On the host: the generation after the last one. The result of the run if there is none."""
        assert self.writer is not None
        step = self._step()
        restarts = 0 if grows(code, message) else 1 if step > last.step else last.restarts + 1
        if restarts > self._cluster.restarts:
            again = f"--max_restarts={self._cluster.restarts}"
            return code, f"{message}\n  the group is not started again: no step since {last.restarts} restarts ({again})"
        following = replace(
            last, number=last.number + 1, members=members, message=message.partition("\n")[0], step=step, restarts=restarts
        )
        return self._formed(replace(following, handed_over=False), code, message)

    def _formed(self, generation: Generation, code: ExitCode, message: str) -> Generation | LaunchResult:
        """With the host's part filled in, and written for the others."""
        assert self.writer is not None
        used = self._sizes.usable(generation.present)
        if used is None:
            least = min(self._sizes.configs)
            return (
                code,
                f"{message}\n  {_nodes(generation.present)} cannot train the run: {least} are needed (--nodes)".lstrip(),
            )
        if generation.number > 1:
            self.writer.begin_generation(self._sizes.configs[used][LaunchOptions].num_processes)
            if self.writer.ownership.lost:
                return ExitCode.TAKEN_OVER, self.writer.ownership.message
        formed = replace(
            generation,
            attempt=cast(float, self.writer.record.started),
            host=self._options.machine_rank,
            address=self._address(),
            port=_free_port(self._options.main_process_port or DEFAULT_PORT),
            used=used,
        )
        self._write(formed)
        return formed

    # --- on the other nodes -----------------------------------------------------------------------------------------

    def _next_of_host(self, attempt: float | None, last: Generation | None = None) -> Generation | LaunchResult:
        """Wait for the next generation, or become the host if there is none any more."""
        turn = self._options.machine_rank * _TURN_SECONDS
        begun, saves, waiting = time.monotonic(), SaveWatch(self._directory), WaitingNodes(self._file.parent)
        while not self._received:
            waiting.show(self._options.machine_rank)
            found = read_generation(self._directory.path)
            newer = found is not None and (found.attempt == attempt if last is None else found.number > last.number)
            if found is not None and newer and not found.handed_over:
                return found
            if (result := self._result(attempt)) is not None:
                return result
            heartbeat = self._directory.watch_heartbeat()
            gone = heartbeat is None or heartbeat.alive() is False
            silence = time.monotonic() - begun if gone else self._directory.heartbeat_watch.silence - STALE_SECONDS
            if silence > turn and saves.quiet() and (host := self._become_host(found or last, waiting)) is not None:
                return host
            time.sleep(POLL_SECONDS)
        return ExitCode.PREEMPTED, _STOPPED

    def _result(self, attempt: float | None) -> LaunchResult | None:
        """What the host has ended the run with; None if it has not."""
        last = self._directory.latest("state") if self._directory.heartbeat() is None else None
        if last is None or last.text("state") not in ENDINGS or last.number("attempt") != attempt:
            return None
        return ExitCode(int(last.number("exit_code") or 0)), last.text("message")

    def _become_host(self, last: Generation | None, waiting: WaitingNodes) -> Generation | LaunchResult | None:
        """Acquire the run directory of a host that is gone. None if another node was faster."""
        try:
            self.writer = self._acquire()
        except InUseError:
            return None
        if last is None:
            return ExitCode.KILLED, "node 0 was lost before the first generation"
        expected = last.present if last.handed_over else max(1, last.present - 1)
        own = self._options.machine_rank
        members = (own, *waiting.there(expected - 1, except_rank=own))
        message = f"node {last.host} {'has left the group' if last.handed_over else 'was lost'}"
        if len(members) < expected:
            message += f", and {_nodes(expected - len(members))} more"
        return self._next(last, members, ExitCode.KILLED, message)

    # --- the run directory ------------------------------------------------------------------------------------------

    def _write(self, generation: Generation) -> None:
        if not self._several:
            return
        try:
            self._file.parent.mkdir(exist_ok=True)
            write_json_atomically(self._file, asdict(generation))
        except OSError as error:
            raise UserError(f"cannot write to {self._file}: {error.strerror or error}", fix="make it writable") from error

    def _address(self) -> str:
        """This node's address in the network of the others."""
        if not self._several:
            return ""
        try:
            return route_to(self._options.main_process_ip or "").address
        except OSError:
            return self._options.main_process_ip or socket.gethostname()

    def _step(self) -> int:
        last = self._directory.latest("step")
        return last.step or 0 if last is not None else 0

    def _checkpoints(self) -> list[str]:
        from smalti.checkpoint import CheckpointStore

        return [entry.path.name for entry in CheckpointStore(self._directory.checkpoints).all()]

    def _newest_step(self) -> int:
        from smalti.checkpoint import CheckpointStore

        entries = CheckpointStore(self._directory.checkpoints).all()
        return entries[-1].step if entries else 0


class SaveWatch:
    """Whether ranks that remain of a generation still save: a new host would end that."""

    def __init__(self, directory: RunDirectory) -> None:
        self._checkpoints = directory.checkpoints
        self._seen: list[tuple[str, int]] = []
        self._since = time.monotonic()

    def quiet(self) -> bool:
        """Whether no file of an unfinished checkpoint has grown for `_SAVE_SECONDS`, or there is none."""
        found: list[tuple[str, int]] = []
        with suppress(OSError):  # it has just been completed
            found = [(str(path), path.stat().st_size) for path in sorted(self._checkpoints.glob(".partial-*/**/*"))]
        if found != self._seen:
            self._seen, self._since = found, time.monotonic()
        return not found or time.monotonic() - self._since > _SAVE_SECONDS


def _reason(group: GroupEnd | None, message: str) -> str:
    """Why a generation has ended, in a sentence about nodes if one of them is gone."""
    parts = [f"{', '.join(group.lost)} lost"] if group is not None and group.lost else []
    parts += [*(f"{each} has left" for each in group.left), *filter(None, [group.error])] if group is not None else []
    return "; ".join(parts) or message


def _free_port(wanted: int) -> int:
    """The port, or another one if something of this node still has it."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    return wanted


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
