"""Run the processes of a launch plan: start them, forward signals as requests, and summarize how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from smalti.errors import ExitCode, UserError
from smalti.launch.folder import launch_folder, processes_of
from smalti.launch.plan import DIGEST_VARIABLE, LaunchPlan
from smalti.launch.standby import AGENT, StandbyLauncher
from smalti.rundir import ATTEMPT_VARIABLE, STOPPED_EARLY, Request, RunDirectory, RunWriter
from smalti.system import (
    FOLDER_VARIABLE,
    PARENT_VARIABLE,
    SIGNALLED,
    STOPPING,
    ExitReport,
    SignalFilter,
    UnreturnedHook,
    allocated_ranks,
    ignore_later_signals,
    immediate_exit_code,
    kill_tree,
    name_ranks,
    preemption_signals,
    read_exit_reports,
    read_hooks,
    read_killed,
    signal_handler,
)

POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
"""Time for ranks to save what they have encoded."""
_STOPS = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
"""The exit codes of ranks that completed or stopped on request. All others are failures."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's agent forwards to its ranks."""
_STARTER = "the process that starts the ranks"

LaunchResult = tuple[ExitCode, str]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of this node ended. `final` is set if a signal or a request ended them: nothing starts them again.

    `ranks` are those that were started here.
    """

    code: ExitCode
    message: str
    final: bool = False
    ranks: range = range(0)


def run_workers(
    plan: LaunchPlan,
    directory: RunDirectory,
    received: list[int],
    *,
    digest: str = "",
    writer: RunWriter | None = None,
    standby: StandbyLauncher | None = None,
    ended_elsewhere: Callable[[], LaunchResult | None] = lambda: None,
) -> Ended:
    """Start the workers of this node and wait for them, within `received_signals`, which gives `received`.

    The first Ctrl-C or signal of `preemption_signals` becomes a stop request that all ranks agree on; before the first step it
    ends the launch. A second one that `SignalFilter` accepts kills every process. Workers refuse a configuration whose digest
    is not `digest`, if given. `writer` is None where a process of another node owns the run directory. `standby` is a process
    that is ready to start the ranks. `ended_elsewhere` is asked all the time; its result ends the ranks. Raises PreflightError
    if temporary files cannot be created.
    """
    with launch_folder(plan.ranks) as folder:
        own = {
            FOLDER_VARIABLE: folder,
            PARENT_VARIABLE: str(os.getpid()),
            **({DIGEST_VARIABLE: digest} if digest else {}),
        }
        if writer is not None:
            own[ATTEMPT_VARIABLE] = repr(writer.record.started)
            writer.phases.enter("launching")
        environment = {**os.environ, **plan.environment, **plan.secrets, **own, **plan.variables}
        processes = _Processes(_start(plan.command, environment, standby), folder)
        try:
            result = _wait(processes, received, directory, writer, ended_elsewhere)
        finally:
            processes.kill()
        reports = Path(folder)
        ranks = plan.ranks or allocated_ranks(reports)
        if result is not None:
            return Ended(code=result[0], message=result[1], final=True, ranks=ranks)
        found, killed, hooks = read_exit_reports(reports), read_killed(reports), read_hooks(reports, ranks)
        code, message = summarize_exits(found, processes.status, ranks, killed, hooks)
        return Ended(code=code, message=message, ranks=ranks)


def _start(command: Sequence[str], environment: Mapping[str, str], standby: StandbyLauncher | None) -> subprocess.Popen[bytes]:
    """Start `python -m LAUNCHER ...` within the agent, or give the command to the standby process."""
    python, switch, *rest = command
    if switch == "-m":
        if standby is not None and (process := standby.start(rest, environment)) is not None:
            return process
        command = (python, "-m", AGENT, *rest)
    return subprocess.Popen(command, env=environment, start_new_session=True)


class _Processes:
    """The process that starts the ranks, and the ranks that remain if it is killed: they save and exit on their own."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str) -> None:
        self._process = process
        self._folder = folder
        self._remaining: list[psutil.Process] | None = None

    @property
    def status(self) -> int:
        """The exit status of the process that starts the ranks."""
        return self._process.returncode

    def ended(self) -> bool:
        """Whether all of them have ended. Waits `POLL_SECONDS` for it."""
        try:
            self._process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        if self._process.returncode >= 0:
            return True
        if self._remaining is None:
            self._remaining = processes_of(self._folder)
            if self._remaining:
                name = signal.Signals(-self._process.returncode).name
                _print(f"{_STARTER} was killed by {name}; waiting for the ranks to save and exit")
        else:
            time.sleep(POLL_SECONDS)
        self._remaining = [each for each in self._remaining if _is_running(each)]
        return not self._remaining

    def send_signal(self, number: int) -> None:
        """Forward a signal. It asks ranks that train to stop, and ends the others."""
        self._process.send_signal(number)
        for each in self._remaining or ():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def kill(self) -> None:
        """Kill those that have not ended."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()
        elif self._remaining is None and self._process.returncode < 0:
            self._remaining = processes_of(self._folder)
        for each in self._remaining or ():
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- signals --------------------------------------------------------------------------------------------------------


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """The signals received so far, without repetitions (`SignalFilter`), for `run_workers`. After it they are ignored."""
    received: list[int] = []
    signal_filter = SignalFilter()

    def handle(number: int, frame: object) -> None:
        if signal_filter.accepts(number):
            received.append(number)

    with signal_handler((signal.SIGINT, *preemption_signals()), handle):
        yield received
        ignore_later_signals()


def _wait(
    processes: _Processes,
    received: list[int],
    directory: RunDirectory,
    writer: RunWriter | None,
    ended_elsewhere: Callable[[], LaunchResult | None],
) -> LaunchResult | None:
    """Wait for the processes and handle signals. Returns a result if signals ended them, None if they ended on their own."""
    request: Request | None = None
    forwarded = False
    while True:
        ended = processes.ended()
        if received and writer is not None and writer.ownership.lost:  # the directory is that of another launch
            _terminate(processes, received)
            return ExitCode.TAKEN_OVER, writer.ownership.message
        if received and _before_first_step(directory):
            return _stop_before_first_step(processes, received, writer)
        if (result := ended_elsewhere()) is not None:
            _terminate(processes, received)
            return result
        if ended:
            return None
        if len(received) > 1:
            name = signal.Signals(received[-1]).name
            _print("ending now")
            processes.kill()
            message = f"ended at once by {name}; what was saved before is complete, later steps are lost"
            return immediate_exit_code(received[-1]), message
        if received and not forwarded and (request is None or _refused(directory, request)):
            request = _request_stop(directory, received[0], on_request=writer is not None and writer.stop_request is not None)
            if request is None:
                processes.send_signal(received[0])
                forwarded = True


def _before_first_step(directory: RunDirectory) -> bool:
    """Whether the loop has not begun. False if the run directory is missing: then it is unknown."""
    record = directory.record()
    return record is not None and record.training_since is None


def _request_stop(directory: RunDirectory, number: int, *, on_request: bool = False) -> Request | None:
    """Ask the run to stop. None if that is not possible: its directory is not writable, or the run has just ended."""
    _print(STOPPING)
    reason = "requested" if on_request else "interrupted" if number == signal.SIGINT else "preempted"
    try:
        return directory.request("stop", reason=reason)
    except UserError:
        return None


def _refused(directory: RunDirectory, request: Request) -> bool:
    """Whether the run refused the request because its loop had not begun, so that it must be repeated."""
    answer = directory.answer(request, timeout=0)
    return answer is not None and not answer.fields.get("accepted")


def _stop_before_first_step(processes: _Processes, received: list[int], writer: RunWriter | None) -> LaunchResult:
    """Before the first step there is nothing to save except encoded samples."""
    _terminate(processes, received)
    if writer is not None and writer.stop_request:
        return ExitCode.STOPPED, STOPPED_EARLY
    code = ExitCode.INTERRUPTED if received[0] == signal.SIGINT else ExitCode.PREEMPTED
    return code, "stopped before the first step; nothing was changed"


def _terminate(processes: _Processes, received: list[int]) -> None:
    """Send SIGTERM, then SIGKILL after `_GRACE_SECONDS` or on another signal."""
    _print("ending now")
    signals, deadline = len(received), time.monotonic() + _GRACE_SECONDS
    processes.send_signal(signal.SIGTERM)
    while not processes.ended() and len(received) == signals and time.monotonic() < deadline:
        pass
    processes.kill()


def _print(text: str) -> None:
    print(f"smalti: {text}", file=sys.stderr, flush=True)


# --- the result -----------------------------------------------------------------------------------------------------


def summarize_exits(
    reports: list[ExitReport],
    status: int,
    ranks: range,
    killed: Mapping[int, str] | None = None,
    hooks: Mapping[int, UnreturnedHook] | None = None,
) -> LaunchResult:
    """Combine the exit reports of the ranks and the exit status of their launcher into one result.

    A failure outweighs a clean stop. The earliest failure that is not `secondary` is the cause; the others followed from it. A
    rank that was killed (by the system, out of memory) writes no report. `killed` has the signals where they are known, and
    such a rank is the cause if all other failures are secondary. Of these, the message of the rank that saved is quoted, or
    else of the last one, which had the most time to diagnose. If no rank reports a failure of its own, the `hooks` that have
    not returned are named.
    """
    silent = sorted(set(ranks) - {report.rank for report in reports} - {rank for each in reports for rank in each.killed_ranks})
    by_signal = {rank: name for rank, name in (killed or {}).items() if rank in silent}
    failures = sorted(
        (report for report in reports if report.exit_code not in _STOPS),
        key=lambda report: (report.secondary, not report.saved, -report.time if report.secondary else report.time),
    )
    terminated = {rank for rank, name in by_signal.items() if name == "SIGTERM"}  # by torch's agent, after another rank's end
    if failures or len(terminated) < len(by_signal):
        by_signal = {rank: name for rank, name in by_signal.items() if rank not in terminated}
        silent = [rank for rank in silent if rank not in terminated]
    in_hooks = {rank: hook for rank, hook in (hooks or {}).items() if rank not in terminated}
    lost = f"{name_ranks(silent)} ended without reporting why, as when killed (out of memory?)" if silent else ""
    saved = [report.saved for report in failures if report.saved]
    if by_signal and all(report.secondary for report in failures):
        signals = ", ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(by_signal.items()))
        hint = " (the system does that when memory runs out)" if "SIGKILL" in by_signal.values() else ""
        causes = "; ".join([f"{signals}{hint}", *(f"rank {report.rank}: {report.message}" for report in failures[:1])])
        return ExitCode.KILLED, "\n  ".join([_with_hooks(causes, in_hooks), *saved])
    if failures:
        causes = "; ".join([f"rank {failures[0].rank}: {failures[0].message}", *([lost] if lost else [])])
        if failures[0].secondary:
            causes = _with_hooks(causes, in_hooks)
        return ExitCode(failures[0].exit_code), "\n  ".join([causes, *saved])
    if status < 0:
        return ExitCode.KILLED, f"{_STARTER} was killed by {signal.Signals(-status).name}; {lost or reports[0].message}"
    if status - SIGNALLED in _STOPPING and lost:
        return ExitCode.KILLED, f"{_STARTER} was stopped by {signal.Signals(status - SIGNALLED).name}; {lost}"
    if status - SIGNALLED in _STOPPING:
        return ExitCode(reports[0].exit_code), reports[0].message
    if status != 0 or not reports:
        causes = f"{lost or 'every rank succeeded, but the launcher failed'} (launcher status {status})"
        return ExitCode.KILLED if lost else ExitCode.FAILED, _with_hooks(causes, in_hooks)
    return ExitCode(reports[0].exit_code), reports[0].message


def _with_hooks(causes: str, hooks: Mapping[int, UnreturnedHook]) -> str:
    """Add the hooks that have not returned. The fixes for their plugins replace those of `causes`."""
    lines = [f"rank {rank} did not return from {hook.hook}" for rank, hook in sorted(hooks.items())]
    fixes = list(dict.fromkeys(f"fix: {hook.fix}" for hook in hooks.values() if hook.fix))
    return "\n  ".join([causes.partition("\n  fix: ")[0] if fixes else causes, *lines, *fixes])
