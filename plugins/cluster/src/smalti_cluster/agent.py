"""What the process that starts the ranks of a node of several adds to torch's agent. Called by `smalti.launch.agent`.

Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from smalti import ExitCode
from smalti.system import ignore_write_errors, write_exit_report
from smalti_cluster.elastic.messages import Place
from smalti_cluster.elastic.rendezvous import GroupMember
from smalti_cluster.nodes.node_watch import note_killed, watch_nodes

FIRST_RANK_VARIABLE = "SMALTI_FIRST_RANK"
"""The environment variable with the lowest rank of this node."""
_RANK_ERRORS = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""For the ranks, which write to the console: of what torch says in C++ only errors. Its warnings are stacks for each request to
the store of a lost node; the agent has the same ones in its log.
"""
EXIT_SECONDS = 3.0
"""The agents of several nodes wait this long for each other once their ranks have ended."""


def extend() -> Callable[[int], None]:
    """Before ranks start: watch the other nodes, and form a group if lost ranks start again."""
    log_apart(Path(sys.argv[-1]))
    shorten_exit_barrier()
    explain_rendezvous()
    watch_nodes()
    note_killed_ranks()
    if (place := Place.of_process()) is None:
        return lambda status: None  # the launcher prints what the ranks have reported
    member = GroupMember(place)
    member.install()
    return member.finish


def log_apart(directory: Path) -> None:
    """Let torch's agent write what it says of ranks that ended to `logs/` in the run directory, and not to the console.

    So with what libraries write in C++ in this process, such as warnings of the store with their stacks. The launcher prints
    why ranks ended; the agent knows only their exit codes.
    """
    import torch.distributed.launcher.api as api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    file = directory / "logs" / f"agent-{socket.gethostname()}.log"
    try:
        file.parent.mkdir(exist_ok=True)
        handler = logging.FileHandler(file)
    except OSError:
        return  # then it stays on the console
    assert handler.stream is not None  # opened at once
    keep_console(handler.stream.fileno())
    os.environ.setdefault(*_RANK_ERRORS)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(handler)
    log.propagate = False
    launch = api.launch_agent

    def launch_and_log(*arguments: Any, **options: Any) -> Any:
        try:
            return launch(*arguments, **options)
        except ChildFailedError as error:
            log.error("%s", error)
            raise

    api.launch_agent = launch_and_log


def keep_console(other: int) -> None:
    """Let Python and the ranks write their errors where they did, and all else in this process to another file."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    sys.stderr.flush()
    console = os.fdopen(os.dup(2), "w", errors="backslashreplace")
    sys.stderr = console
    ignore_write_errors("stderr")
    os.dup2(other, 2)
    start = SubprocessHandler._popen

    def start_on_console(self: SubprocessHandler, arguments: tuple[str, ...], environment: dict[str, str]) -> Any:
        own, self._stderr = self._stderr, self._stderr or console
        try:
            return start(self, arguments, environment)
        finally:
            self._stderr = own

    SubprocessHandler._popen = start_on_console  # type: ignore[method-assign, assignment]


def note_killed_ranks() -> None:
    """Let the other nodes know which ranks were killed by a signal, before the remaining ones are stopped."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close = SubprocessContext._close

    def note_and_close(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        handlers: Mapping[int, subprocess.Popen[bytes]] = {
            int(self.envs[local]["RANK"]): handler.proc for local, handler in self.subprocess_handlers.items()
        }
        note_killed(handlers)
        close(self, death_sig, timeout)

    SubprocessContext._close = note_and_close  # type: ignore[method-assign]


def shorten_exit_barrier() -> None:
    """Let torch's agent wait at most `EXIT_SECONDS` for the agents of other nodes once its own ranks have ended.

    Ranks end together (`smalti.launch.rank`), so nothing depends on it but the store, which is in the agent of node 0. torch
    waits 300 seconds for an agent that was stopped by a signal.
    """
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID, SimpleElasticAgent
    from torch.distributed.elastic.utils.store import barrier

    def wait_for_agents(self: SimpleElasticAgent) -> None:
        with suppress(RuntimeError):  # one has ended, or with it the store
            nodes = cast(int, self._worker_group.group_world_size)
            barrier(self._store, nodes, _TERMINAL_STATE_SYNC_ID, barrier_timeout=EXIT_SECONDS)

    SimpleElasticAgent._exit_barrier = wait_for_agents  # type: ignore[method-assign]


def explain_rendezvous() -> None:
    """Report it if the nodes do not find each other: torch's agent ends before it has started a rank."""
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    meet = StaticTCPRendezvous.next_rendezvous

    def meet_or_report(self: StaticTCPRendezvous) -> RendezvousInfo:
        try:
            return meet(self)
        except RuntimeError as error:
            where, seconds = f"{self.master_addr}:{self.master_port}", int(self.timeout.total_seconds())
            reason = str(error).partition("\n")[0].strip()
            met = f"the {self.world_size} nodes did not all connect to {where} within {seconds} s"
            message = f"{met}, so no rank was started: {reason}"
            fix = "give all nodes the same --main_process_ip and --main_process_port, and check that they reach that address"
            first = int(os.environ.get(FIRST_RANK_VARIABLE, "0"))
            write_exit_report(ExitCode.PREFLIGHT, f"{message}\n  fix: {fix}", rank=first)
            sys.exit(int(ExitCode.PREFLIGHT))  # the launcher prints the message

    StaticTCPRendezvous.next_rendezvous = meet_or_report  # type: ignore[method-assign]
