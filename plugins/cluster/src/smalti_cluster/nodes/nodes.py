"""What the nodes of a launch agree on in the run directory that they share, before any of them starts a rank.

    nodes/node-K.json   which node K is: its host, version, plugins and options; replaced by each launch
    nodes/refused-T     the host of another node 0, which has ended; node 0 says so and removes the file

Node 0 waits for the others, compares, and enters into its own file with whom it starts. A node that differs is named on all
nodes with what differs. So torch's rendezvous, which only knows how many nodes have come, begins when all are there. What files
cannot show is checked over the network, see `smalti_cluster.checks.preflight`.

`attempt` is that of node 0, which distinguishes this launch from others. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import click

from smalti import ConfigError, ExitCode, PreflightError, Problem, UserError
from smalti.config import Config, LaunchOptions
from smalti.plugins import Plugins
from smalti.rundir import POLL_SECONDS, EventWriter, RunDirectory
from smalti.system import load_json, read_regular, write_json_atomically
from smalti_cluster.checks.preflight import NodeChecks, Notice
from smalti_cluster.elastic.messages import Generation, read_generation
from smalti_cluster.options import ClusterOptions, is_elastic, node_range
from smalti_cluster.schedulers.hostlist import expand_hostlist

EXPECTED_VARIABLE = "EXPECTED_SMALTI_NODES"
"""The environment variable with the machine ranks that start together, as in "0,2": a launcher knows which are not there yet.
SMALTI_* are options.
"""
_CHECK_SECONDS = 2.0
"""How often node 0 looks at the others while it scans the data."""
_TAKEN_SECONDS = 6.0
"""How long another node 0 is looked for, which changes its heartbeat every 5 seconds."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The content of a file. `agreed` is filled by node 0: the token of each node with which it starts.

    `unreachable` is why this node cannot connect to node 0.
    """

    machine_rank: int
    attempt: float
    token: str
    host: str
    version: str
    plugins: list[str]
    values: dict[str, object]
    agreed: dict[str, str] = field(default_factory=dict)
    unreachable: str = ""

    @property
    def name(self) -> str:
        return f"node {self.machine_rank} ({self.host})"


def wait_for_node_0(directory: RunDirectory, seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until node 0 has acquired the run directory, which must be on shared storage. `check` is called often and may raise.

    Raises PreflightError if there is no sign of node 0 for this number of seconds.
    """
    notice = Notice()
    for waited in _while_node_0_lives(directory, seconds):
        check()
        heartbeat = directory.heartbeat()
        if directory.record() is not None and heartbeat is not None and heartbeat.alive() is not False:
            return
        if waited == 0:
            click.echo(f"smalti: waiting for node 0 to create {directory.path}", err=True)
        notice.print(waited, f"waiting for node 0 to create {directory.path}, for {waited:.0f} of {seconds:.0f} s")


class Nodes:
    """The nodes of a launch, as seen by this one. `kind` is that of its accelerators. Close it before ranks start.

    `late`: others train already, and this node waits for the next generation of the group.
    """

    def __init__(self, directory: RunDirectory, config: Config, plugins: Plugins, kind: str = "cpu") -> None:
        self._directory = directory
        self._folder = directory.path / "nodes"
        self._config = config
        self._options = config[LaunchOptions]
        self._checks = NodeChecks(directory.path, config, plugins, kind)
        self._notice = Notice()
        self._announced = 0.0
        self._refused: list[str] = []
        self.late = False
        self._least, most = node_range(config)
        self.members = tuple(range(most))
        self._timeout, self._elastic = config[ClusterOptions].rendezvous_timeout, is_elastic(config)
        expected = os.environ.get(EXPECTED_VARIABLE)
        expected_ranks = self.members if expected is None else map(int, expected.split(","))
        self._others = set(expected_ranks) - {self._options.machine_rank}
        self._own = Node(
            machine_rank=self._options.machine_rank,
            attempt=0.0,
            token=secrets.token_hex(8),
            host=f"{socket.gethostname()}, process {os.getpid()}",
            version=version("smalti"),
            plugins=list(plugins.versions),
            values=load_json(json.dumps(config.masked(config.shared_values()))),
        )

    def close(self) -> None:
        self._checks.close()

    @property
    def attempt(self) -> float:
        """The attempt of node 0 in which this node takes part."""
        return self._own.attempt

    # --- node 0 -----------------------------------------------------------------------------------------------------

    def begin(self, attempt: float) -> None:
        """Let the other nodes take part in this attempt. Raises PreflightError if they could not connect."""
        self._checks.listen()
        self.announce(attempt)

    def refuse_second(self) -> None:
        """Raise ConfigError if another process waits for nodes as node 0 of this directory, which then learns of this one."""
        deadline = time.monotonic() + _TAKEN_SECONDS
        while time.monotonic() < deadline:
            heartbeat, other = self._directory.watch_heartbeat(), self._read(0)
            if heartbeat is not None and other is not None and other.attempt == heartbeat.started:
                if other.agreed or other.token == self._own.token:
                    return  # a launch that is complete, and this one
                if heartbeat.alive() or self._directory.heartbeat_watch.changed:
                    with suppress(OSError):
                        write_json_atomically(self._folder / f"refused-{self._own.token}", self._own.host)
                    raise ConfigError([_taken(other, len(self.members))])
            time.sleep(POLL_SECONDS)

    def announce(self, attempt: float) -> None:
        """Write that this node takes part in an attempt."""
        self._announced = time.monotonic()
        self._write(replace(self._own, attempt=attempt))

    def checked(self, progress: Callable[[int, int | None], None]) -> Callable[[int, int | None], None]:
        """The same reporting of progress, which also compares the nodes that have come so far."""
        looked = time.monotonic()

        def advance(done: int, total: int | None) -> None:
            nonlocal looked
            if time.monotonic() - looked > _CHECK_SECONDS:
                self._compare(self._present())
                self._say_refused()
                self._checks.connected()
                looked = time.monotonic()
            progress(done, total)

        return advance

    def gather(self, events: EventWriter | None = None) -> None:
        """Wait on node 0 until all nodes have come, check them against each other, and let them start.

        Raises ConfigError if one of them has other options, plugins or another version, PreflightError if one does not come or
        if they could not train together.
        """
        seconds = self._timeout
        for waited in _waiting():
            present = self._present()
            self._compare(present)
            connected = self._checks.connected()
            present = {rank: node for rank, node in present.items() if rank in connected}
            missing = sorted(self._others - present.keys())
            self._say_refused()
            if not missing or (waited > seconds and len(present) + 1 >= self._least):
                break
            if waited > seconds:
                started_as_0 = f"; {', '.join(self._refused)} had --machine_rank=0" if self._refused else ""
                raise PreflightError(
                    f"{self._named(missing)} did not start within {seconds} s{started_as_0}",
                    fix=f"start the same command there with --machine_rank={missing[0]} and the same --output_dir, on shared "
                    "storage; --rendezvous_timeout waits longer",
                )
            here = ", ".join(node.name for node in (self._own, *present.values()))
            self._notice.print(waited, f"waiting for {self._named(missing)}, for {waited:.0f} of {seconds} s; present: {here}")
        self._checks.run(events)
        self.members = tuple(sorted({self._options.machine_rank, *present}))
        self._write(replace(self._own, agreed={str(rank): node.token for rank, node in present.items()}))

    def _say_refused(self) -> None:
        """Say which other nodes had the number of this one. They have ended."""
        for file in sorted(self._folder.glob("refused-*")):
            with suppress(OSError, ValueError):
                host = str(load_json(read_regular(file)))
                file.unlink()
                self._refused.append(host)
                message = f"{host}, was started with --machine_rank=0 too, and has ended"
                click.echo(f"smalti: {message}; start it with its own number. This node continues to wait", err=True)

    def _named(self, ranks: list[int]) -> str:
        """Nodes with the hosts on which they are expected: those of the scheduler, else those of the last launch."""
        listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
        try:
            hosts = expand_hostlist(listed) if listed else []
        except ValueError:
            hosts = []
        names = []
        for rank in ranks:
            last = self._read(rank)
            host = hosts[rank] if rank < len(hosts) else last.host.partition(",")[0] if last is not None else ""
            names.append(f"node {rank} ({host})" if host else f"node {rank}")
        return ", ".join(names)

    def _present(self) -> dict[int, Node]:
        found = {rank: self._read(rank) for rank in sorted(self._others)}
        return {rank: node for rank, node in found.items() if node is not None and node.attempt == self._own.attempt}

    def _compare(self, present: Mapping[int, Node]) -> None:
        problems = [problem for node in present.values() for problem in self._differences(self._own, node)]
        if problems:
            raise ConfigError(problems)
        for node in present.values():
            if node.unreachable:
                raise PreflightError(node.unreachable, fix="allow TCP to that port of node 0 (firewall, network)")

    # --- the others -------------------------------------------------------------------------------------------------

    def wait_for_node_0(self) -> None:
        """Wait until node 0 has the run directory. Raises PreflightError if it does not, or if it has another one."""
        if running_group(self._directory) is not None:
            return
        if not self._elastic or running_group(self._directory) is None:
            self._checks.connect()
        wait_for_node_0(self._directory, self._timeout, self._checks.raise_failure)

    def join(self) -> None:
        """Wait until node 0 starts with this node.

        Raises ConfigError if this node differs from node 0, and what node 0 has ended with if it does not start.
        """
        try:
            self._join()
        except UserError:
            self.close()  # so that another process of this number can connect
            raise
        except (KeyboardInterrupt, SystemExit):
            self.close()
            self._file(self._own.machine_rank).unlink(missing_ok=True)  # so that node 0 waits for one that takes its place
            raise

    def _join(self) -> None:
        if self._elastic and (running := running_group(self._directory)) is not None:
            self.announce(running.attempt)  # later than the others: for the next generation
            self.late = True
            return
        self._checks.connect()
        for waited in _while_node_0_lives(self._directory, self._timeout):
            self._checks.raise_failure()
            attempt = self._attempt()
            if attempt is not None and attempt != self._own.attempt:
                self.announce(attempt)
            leader = self._read(0)
            if leader is not None and leader.attempt == self._own.attempt:
                if problems := self._differences(leader, self._own):
                    raise ConfigError(problems)
                if leader.agreed.get(str(self._own.machine_rank)) == self._own.token:
                    return
            if self._own.attempt:
                self._check_end()
                self._check_own()
                self._check_connection()
            self._notice.print(waited, f"waiting for node 0 to scan the data, and for the other nodes, for {waited:.0f} s")

    def _attempt(self) -> float | None:
        """The attempt of node 0 that is under way; None if there is none."""
        heartbeat, leader = self._directory.heartbeat(), self._read(0)
        if heartbeat is None or heartbeat.alive() is False or leader is None or leader.attempt != heartbeat.started:
            return None
        return leader.attempt

    def _check_end(self) -> None:
        """Raises what the launch on node 0 has ended with, if it has ended."""
        record, status = self._directory.record(), self._directory.status()
        if record is not None and record.started == self._own.attempt and self._directory.heartbeat() is None and status.ended:
            error = UserError(f"node 0 has ended: {status.message}", fix="see the output of node 0")
            error.exit_code = ExitCode(status.exit_code or 0)
            raise error

    def _check_own(self) -> None:
        """Raises PreflightError if another node has this one's number."""
        other = self._read(self._own.machine_rank)
        if self._own.attempt and other is not None and other.token != self._own.token and other.attempt == self._own.attempt:
            raise PreflightError(
                f"{other.name} has started with the --machine_rank of this node",
                fix=f"give each node its own --machine_rank, from 0 to {self._options.num_machines - 1}",
            )

    def _check_connection(self) -> None:
        """Raises PreflightError on this node and on node 0 if this one cannot connect to it."""
        if (error := self._checks.unreachable(self._announced)) is not None:
            self._write(replace(self._own, unreachable=error.message))
            raise error

    # --- all --------------------------------------------------------------------------------------------------------

    def _differences(self, leader: Node, node: Node) -> list[Problem]:
        """What a node has otherwise than node 0."""
        found = []
        if node.version != leader.version:
            message = f"smalti is {node.version} on {node.name} and {leader.version} on {leader.name}"
            found.append(Problem(message=message, fix="install the same version on all nodes"))
        for only, lacking, names in (
            (node, leader, set(node.plugins) - set(leader.plugins)),
            (leader, node, set(leader.plugins) - set(node.plugins)),
        ):
            if names:
                message = f"{', '.join(sorted(names))} is on {only.name} and not on {lacking.name}"
                fix = "install the same plugins on all nodes, and give the same --plugins and --without"
                found.append(Problem(message=message, fix=fix))
        for name in sorted(leader.values.keys() | node.values.keys()):
            if (here := node.values.get(name)) != (there := leader.values.get(name)):
                message = f"{name} is {here!r} on {node.name} and {there!r} on {leader.name}"
                found.append(Problem(message=message, fix=f"give the same --{name} on all nodes", option=name))
        return found

    def _write(self, node: Node) -> None:
        self._own = node
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self._file(node.machine_rank), asdict(node))
        except OSError as error:
            message = f"cannot write to {self._folder}: {error.strerror or error}"
            raise UserError(message, fix="make --output_dir writable on all nodes, or give --no_shared_output_dir") from error

    def _read(self, rank: int) -> Node | None:
        """What a node has written; None for nothing, and for a file of another version that has other fields."""
        try:
            return Node(**load_json(read_regular(self._file(rank))))
        except (OSError, ValueError, TypeError):
            return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"node-{rank}.json"


def running_group(directory: RunDirectory) -> Generation | None:
    """The generation of nodes that trains in this directory; None if there is none, or if its host is gone."""
    found, heartbeat = read_generation(directory.path), directory.heartbeat()
    if found is None or found.handed_over or heartbeat is None or heartbeat.alive() is False:
        return None
    return found if heartbeat.started == found.attempt else None


def _taken(other: Node, nodes: int) -> Problem:
    """The problem of a second node 0."""
    ranks = "1" if nodes == 2 else f"a number from 1 to {nodes - 1}"
    return Problem(
        message=f"--machine_rank=0 is taken by {other.host}, which waits for the other nodes of this launch",
        fix=f"give this node its own --machine_rank, {ranks}; for another run, choose another --output_dir",
        option="machine_rank",
    )


def _while_node_0_lives(directory: RunDirectory, seconds: float) -> Iterator[float]:
    """Yields the seconds since the beginning until node 0 gives no sign of life: its heartbeat does not change.

    By this node's own clock, because clocks of nodes differ. Raises PreflightError then.
    """
    seen, changed = None, time.monotonic()
    for waited in _waiting():
        yield waited
        heartbeat = directory.heartbeat()
        if heartbeat is not None and (sign := (heartbeat.started, heartbeat.touched)) != seen:
            seen, changed = sign, time.monotonic()
        if time.monotonic() - changed > seconds:
            break
    raise PreflightError(
        f"node 0 did not create the run directory {directory.path} within {seconds:.0f} s",
        fix="start the same command there with --machine_rank=0; all nodes must share the same --output_dir",
    )


def _waiting() -> Iterator[float]:
    """Yields the seconds since the beginning, several times a second."""
    begun = time.monotonic()
    while True:
        yield time.monotonic() - begun
        time.sleep(POLL_SECONDS)
