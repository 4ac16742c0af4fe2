"""Running workers: start the processes of a launch plan, pass signals on as requests, say how it all ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from smalti.errors import ExitCode, PreflightError, UserError
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
    ignore_later_signals,
    immediate_exit_code,
    preemption_signals,
    read_exit_reports,
    read_hooks,
    read_killed,
    signal_handler,
)

POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 10.0
"""In which ranks write down what they have encoded."""
_STOPS = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
"""How a rank ends that did what was asked of it; everything else is a failure."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What torch's agent passes on to its ranks."""
_STARTER = "the process that starts the ranks"

LaunchResult = tuple[ExitCode, str]


def run_workers(
    plan: LaunchPlan,
    directory: RunDirectory,
    *,
    digest: str = "",
    writer: RunWriter | None = None,
    standby: StandbyLauncher | None = None,
) -> LaunchResult:
    """Start the workers of this node and wait for them. Returns the exit code and a message that explains it.

    The first Ctrl-C or signal of `preemption_signals` becomes a stop request that all ranks agree on; before the first step it
    ends the launch. A second one that `SignalFilter` accepts kills every process. Workers refuse a configuration whose digest
    is not `digest`, if given. `writer` is None where a process of another node owns the run directory. `standby` is a process
    that is ready to start the ranks. Raises PreflightError if the port for the other nodes is in use, or if temporary files
    cannot be created.
    """
    if plan.port is not None:
        _check_port(plan.port)
    with launch_folder(plan.ranks) as ends, _signals() as received:
        own = {FOLDER_VARIABLE: ends, PARENT_VARIABLE: str(os.getpid()), **({DIGEST_VARIABLE: digest} if digest else {})}
        if writer is not None:
            own[ATTEMPT_VARIABLE] = repr(writer.record.started)
            writer.phases.enter("launching")
        environment = {**os.environ, **plan.environment, **plan.secrets, **own}
        launched = _Launched(_started(plan.command, environment, standby), ends)
        try:
            verdict = _wait(launched, received, directory, writer)
        finally:
            launched.end()
        ignore_later_signals()
        folder = Path(ends)
        if verdict is not None:
            return verdict
        return summarize_exits(
            read_exit_reports(folder), launched.status, plan.ranks, read_killed(folder), read_hooks(folder, plan.ranks)
        )


def _started(
    command: Sequence[str], environment: Mapping[str, str], standby: StandbyLauncher | None
) -> subprocess.Popen[bytes]:
    """`python -m LAUNCHER ...` such that it writes down which of its ranks were killed."""
    python, switch, *rest = command
    if switch == "-m":
        if standby is not None and (process := standby.start(rest, environment)) is not None:
            return process
        command = (python, "-m", AGENT, *rest)
    return subprocess.Popen(command, env=environment, start_new_session=True)


class _Launched:
    """The process that starts the ranks, and those that it leaves behind if it is killed: they save and leave by themselves."""

    def __init__(self, process: subprocess.Popen[bytes], ends: str) -> None:
        self._process = process
        self._ends = ends
        self._left: list[psutil.Process] | None = None

    @property
    def status(self) -> int:
        """How the process that starts the ranks has ended."""
        return self._process.returncode

    def over(self) -> bool:
        """Whether all of them have ended; waits for it a moment."""
        try:
            self._process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        if self._process.returncode >= 0:
            return True
        if self._left is None:
            self._left = processes_of(self._ends)
            if self._left:
                name = signal.Signals(-self._process.returncode).name
                _say(f"{_STARTER} was killed by {name}; waiting for the ranks to save and leave")
        else:
            time.sleep(POLL_SECONDS)
        self._left = [each for each in self._left if _runs(each)]
        return not self._left

    def pass_on(self, number: int) -> None:
        """A signal, which asks ranks whose run has begun to stop, and ends others."""
        self._process.send_signal(number)
        for each in self._left or ():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def end(self) -> None:
        """At once, if they have not ended."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()
        elif self._left is None and self._process.returncode < 0:
            self._left = processes_of(self._ends)
        for each in self._left or ():
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"port {port} of this node cannot be used: {error.strerror}"
            raise PreflightError(message, fix="--main_process_port=ANOTHER, the same on every machine") from error


# --- signals --------------------------------------------------------------------------------------------------------


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came in, without mere repetitions (`SignalFilter`), for the waiting loop to look at."""
    received: list[int] = []
    signal_filter = SignalFilter()

    def handle(number: int, frame: object) -> None:
        if signal_filter.accepts(number):
            received.append(number)

    with signal_handler((signal.SIGINT, *preemption_signals()), handle):
        yield received


def _wait(launched: _Launched, received: list[int], directory: RunDirectory, writer: RunWriter | None) -> LaunchResult | None:
    """Wait for the end and obey signals. A verdict if they ended the processes; None if those ended by themselves."""
    asked: Request | None = None
    passed_on = False
    elsewhere = _Elsewhere(directory) if writer is None else None
    while True:
        over = launched.over()
        if received and _is_young(directory):
            return _end_early(launched, received, writer)
        if elsewhere is not None and (verdict := elsewhere.stopped_early()):
            _end_gently(launched, received)
            return verdict
        if over:
            return None
        if len(received) > 1:
            message = (
                f"ended at once by {signal.Signals(received[-1]).name}; what was saved before is complete, later steps are lost"
            )
            return _end_now(launched, immediate_exit_code(received[-1]), message)
        if received and not passed_on and (asked is None or _refused(directory, asked)):
            asked = _ask(directory, received[0], on_request=writer is not None and writer.stop_request is not None)
            if asked is None:
                launched.pass_on(received[0])
                passed_on = True


def _is_young(directory: RunDirectory) -> bool:
    """Whether the loop of the run that this launch is for has not begun; not known of one whose directory is gone."""
    record = directory.record()
    return record is not None and record.training_since is None


class _Elsewhere:
    """The launch as its first machine, which is another one, tells of it in the run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        heartbeat = directory.heartbeat()
        self._attempt = heartbeat.started if heartbeat is not None else None
        self._looked = time.monotonic()

    def stopped_early(self) -> LaunchResult | None:
        """What became of it if it was stopped before its first step. Looks now and then."""
        if self._attempt is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        record, heartbeat = self._directory.record(), self._directory.heartbeat()
        if heartbeat is not None or record is None or record.started != self._attempt or record.training_since is not None:
            return None
        status = self._directory.status()
        return (ExitCode(status.exit_code or 0), status.message) if status.condition == "stopped" else None


def _ask(directory: RunDirectory, number: int, *, on_request: bool = False) -> Request | None:
    """Ask the run to stop; None when it cannot be asked: because of its directory, or at its very end."""
    _say(STOPPING)
    reason = "requested" if on_request else "interrupted" if number == signal.SIGINT else "preempted"
    try:
        return directory.request("stop", reason=reason)
    except UserError:
        return None


def _refused(directory: RunDirectory, asked: Request) -> bool:
    """Whether the run was too young to obey, and has to be asked again."""
    answer = directory.answer(asked, timeout=0)
    return answer is not None and not answer.fields.get("accepted")


def _end_early(launched: _Launched, received: list[int], writer: RunWriter | None) -> LaunchResult:
    """Before the first step there is nothing to save but what is being encoded."""
    number = received[0]
    _end_gently(launched, received)
    if writer is not None and writer.stop_request:
        return ExitCode.STOPPED, STOPPED_EARLY
    code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED
    return code, "stopped before the run began; nothing was changed"


def _end_gently(launched: _Launched, received: list[int]) -> None:
    """Soon, or at once by one more signal."""
    _say("ending now")
    signals, deadline = len(received), time.monotonic() + _GRACE_SECONDS
    launched.pass_on(signal.SIGTERM)
    while not launched.over() and len(received) == signals and time.monotonic() < deadline:
        pass
    launched.end()


def _end_now(launched: _Launched, code: ExitCode, message: str) -> LaunchResult:
    _say("ending now")
    launched.end()
    return code, message


def _say(text: str) -> None:
    print(f"smalti: {text}", file=sys.stderr, flush=True)


def kill_tree(pid: int) -> None:
    """Kill a process and everything below it; workers have sessions of their own, so a process group would not do."""
    try:
        parent = psutil.Process(pid)
        parent.suspend()  # so that it starts nothing more while its children are counted
        children = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in (*children, parent):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


# --- the verdict ----------------------------------------------------------------------------------------------------


def summarize_exits(
    ends: list[ExitReport],
    status: int,
    ranks: range,
    killed: Mapping[int, str] | None = None,
    hooks: Mapping[int, UnreturnedHook] | None = None,
) -> LaunchResult:
    """One verdict for the launch from the last words of its ranks and the launcher's own exit status.

    A failure outweighs a clean stop, and the earliest failure of a rank's own is the cause: the others are what it led to. A
    rank that was killed (by the system, out of memory) leaves no word; `killed` tells the signals where they are known, and
    such a rank is the cause if all that the others tell is that it is gone. Of those, the one that saved is asked what it
    found, or else the last, who had most time to look. Where no rank tells of a failure of its own, the `hooks` that ranks did
    not come back from are named.
    """
    silent = sorted(set(ranks) - {end.rank for end in ends} - {rank for end in ends for rank in end.ended})
    by_signal = {rank: name for rank, name in (killed or {}).items() if rank in silent}
    failures = sorted(
        (end for end in ends if end.exit_code not in _STOPS),
        key=lambda end: (end.follows, not end.saved, -end.time if end.follows else end.time),
    )
    ended = {rank for rank, name in by_signal.items() if name == "SIGTERM"}  # by torch's agent, once another was gone
    if failures or len(ended) < len(by_signal):
        by_signal = {rank: name for rank, name in by_signal.items() if rank not in ended}
        silent = [rank for rank in silent if rank not in ended]
    in_hooks = {rank: end for rank, end in (hooks or {}).items() if rank not in ended}
    lost = f"{_names(silent)} ended without a word, as when killed (out of memory?)" if silent else ""
    saved = [end.saved for end in failures if end.saved]
    if by_signal and all(end.follows for end in failures):
        told = ", ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(by_signal.items()))
        hint = " (the system does that when memory runs out)" if "SIGKILL" in by_signal.values() else ""
        causes = "; ".join([f"{told}{hint}", *(f"rank {end.rank}: {end.message}" for end in failures[:1])])
        return ExitCode.KILLED, "\n  ".join([_with_hooks(causes, in_hooks), *saved])
    if failures:
        causes = "; ".join([f"rank {failures[0].rank}: {failures[0].message}", *([lost] if lost else [])])
        if failures[0].follows:
            causes = _with_hooks(causes, in_hooks)
        return ExitCode(failures[0].exit_code), "\n  ".join([causes, *saved])
    if status < 0:
        told = lost or ends[0].message
        return ExitCode.KILLED, f"{_STARTER} was killed by {signal.Signals(-status).name}; {told}"
    if status - SIGNALLED in _STOPPING and lost:
        return ExitCode.KILLED, f"{_STARTER} was stopped by {signal.Signals(status - SIGNALLED).name}; {lost}"
    if status - SIGNALLED in _STOPPING:
        return ExitCode(ends[0].exit_code), ends[0].message
    if status != 0 or not ends:
        causes = f"{lost or 'every rank ended well, and the launcher did not'} (launcher status {status})"
        return ExitCode.KILLED if lost else ExitCode.FAILED, _with_hooks(causes, in_hooks)
    return ExitCode(ends[0].exit_code), ends[0].message


def _with_hooks(causes: str, hooks: Mapping[int, UnreturnedHook]) -> str:
    """With the hooks that ranks did not come back from; what to do about their plugins replaces what others advise."""
    lines = [f"rank {rank} did not come back from {end.hook}" for rank, end in sorted(hooks.items())]
    fixes = list(dict.fromkeys(f"fix: {end.fix}" for end in hooks.values() if end.fix))
    return "\n  ".join([causes.partition("\n  fix: ")[0] if fixes else causes, *lines, *fixes])


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(str(rank) for rank in ranks)}"
