"""Runs torch's or Accelerate's launcher of ranks, and adds what a run needs that loses a rank or reaches its time limit.

- It reports which ranks were killed by a signal: they cannot report it themselves.
- After a failure it kills the remaining ranks only once they make no progress. torch gives them 30 seconds to save and has no
  setting for it.
- If its parent is killed, it handles that like SIGTERM: the ranks save and exit. So it does with SIGUSR1 and SIGUSR2. If it is
  killed itself, the ranks save and exit on their own.

`python -m smalti.launch.agent MODULE [ARGUMENTS]` does what `python -m MODULE [ARGUMENTS]` does. In standby mode
(`smalti.launch.standby`) it waits for that command. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from smalti.errors import ExitCode
from smalti.system import (
    FOLDER_VARIABLE,
    PARENT_VARIABLE,
    SIGNALLED,
    ProcessExit,
    die_with_parent,
    ignore_write_errors,
    importing,
    keep_imports,
    latest_progress,
    write_exit_report_as,
    write_exit_report_for,
    write_killed,
)
from smalti_cluster.elastic.messages import Place
from smalti_cluster.elastic.rendezvous import GroupMember
from smalti_cluster.nodes.node_watch import note_killed, watch_nodes

STAND_BY = "--stand-by="
"""The argument of standby mode, followed by the file descriptor from which the command is read."""
FIRST_RANK_VARIABLE = "SMALTI_FIRST_RANK"
"""The environment variable with the lowest rank of this node."""
STOP_SECONDS = 600.0
"""A rank that was asked to stop is killed after this long without progress of a save. It may have to end a long validation."""
LOST_SECONDS = 120.0
"""The same after another rank failed: ranks that can exit do so within a minute (`smalti.training.failures.watchdog`)."""
EXIT_SECONDS = 3.0
"""The agents of several nodes wait this long for each other once their ranks have ended."""
_POLL_SECONDS = 0.1


def main() -> None:
    end = ProcessExit.install()
    keep_imports()
    ignore_write_errors()
    die_with_parent()
    with importing():
        import torch.distributed.launcher.api  # noqa: F401 - what all launchers need
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command: list[str] | None = sys.argv[1:]
    if sys.argv[1].startswith(STAND_BY):
        command = wait_for_command(int(sys.argv[1].removeprefix(STAND_BY)))
    if command is None:
        end.code = 0
        return
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE)  # torch creates a folder for logs there and does not remove it
    sys.argv = command
    extend_kill_timeout()
    shorten_exit_barrier()
    explain_rendezvous()
    watch_nodes()
    forward_notices()
    place = Place.of_process()
    member = GroupMember(place) if place is not None else None
    if member is not None:
        member.install()
    status = 1
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        end.code = status = 0
    except ChildFailedError as error:
        write_killed({rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0})
        end.code = status
        if member is None:
            raise
    except SignalException as stop:  # the ranks got the signal too, and report how they ended
        end.code = status = SIGNALLED + stop.sigval
    finally:
        if member is not None:
            member.finish(status)


def wait_for_command(descriptor: int) -> list[str] | None:
    """Read the command to run and apply its environment to this process. None if the launch ended without one."""
    with os.fdopen(descriptor, encoding="ascii") as pipe:
        text = pipe.read()
    if not text.endswith("\n"):  # the writer ended, perhaps in the middle of it
        return None
    request = json.loads(text)
    os.environ.clear()
    os.environ.update(request["environment"])
    return list(request["command"])


def forward_notices() -> None:
    """Turn SIGUSR1 and SIGUSR2, which would kill torch's agent, into SIGTERM, which it forwards to its ranks."""
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(notice) is not signal.SIG_IGN:
            signal.signal(notice, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def extend_kill_timeout() -> None:
    """Let torch's agent kill a rank only once it makes no progress, however long its exit takes."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close = SubprocessContext._close

    def close_after_exit(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        ranks = {int(self.envs[local]["RANK"]): handler.proc for local, handler in self.subprocess_handlers.items()}
        note_killed(ranks)
        if death_sig != signal.SIGKILL:
            for process in ranks.values():
                if process.poll() is None:
                    os.killpg(process.pid, death_sig)
            wait_for_ranks(ranks)
        close(self, signal.SIGKILL, timeout)  # kills the remaining ranks, and closes torch's own resources

    SubprocessContext._close = close_after_exit  # type: ignore[method-assign]


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
            write_exit_report_as(int(os.environ.get(FIRST_RANK_VARIABLE, "0")), ExitCode.PREFLIGHT, f"{message}\n  fix: {fix}")
            sys.exit(int(ExitCode.PREFLIGHT))  # the launcher prints the message

    StaticTCPRendezvous.next_rendezvous = meet_or_report  # type: ignore[method-assign]


def wait_for_ranks(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended, or the remaining ones make no progress. Writes exit reports for those."""
    asked = time.time()
    while running := [rank for rank, process in ranks.items() if process.poll() is None]:
        lost = any(process.poll() for process in ranks.values())
        timeout = LOST_SECONDS if lost else STOP_SECONDS
        if all(time.time() - max(asked, latest_progress(rank)) > timeout for rank in running):
            why = "another rank failed" if lost else "it was asked to stop"
            for rank in running:
                write_exit_report_for(rank, f"made no progress for {timeout:.0f} s after {why}, and was killed")
            return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
