"""`python -m MODULE` without a new interpreter: a process is forked from one in which the imports have been made.

What a launcher starts in this way are its own children, with real signals and exit codes. In /proc they look like the command.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import os
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module, invalidate_caches, reload
from pathlib import Path

from support.imports import MODULES, import_for_runs

from .namespaces import adopt_orphans, end_with_parent, show_as

HEAVY = (
    *MODULES,
    "smalti.cli.entry",
    "smalti.cli.train",
    "smalti_health.monitor.rank",
    "smalti_toy.family",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
)
FORKED = {"smalti", "smalti_doctor.measure", "smalti_plan.counted", "smalti_plan.probe", "smalti_plan.rates", "torch"}
"""Packages and modules that are forked; of torch, its launcher."""
_LONGEST = 1 << 18


def import_heavy() -> None:
    import_for_runs()
    for name in HEAVY:
        import_module(name)
    sys.modules.pop("torch.distributed.run")  # which the agent executes as a module; what that one imports is there
    # The agent of torch asks inspect.stack() for the name of a caller, which goes through all modules: seconds a launch, here.
    dynamic_rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def module_of(command: Sequence[str]) -> int | None:
    """The place of the module in `python -m MODULE ...`; None for another command."""
    options = [word for word in command[1:3] if word in ("-u", "-P")]
    place = 2 + len(options)
    ours = (
        len(command) > place and os.path.normpath(command[0]) == os.path.normpath(sys.executable) and command[place - 1] == "-m"
    )
    return place if ours and not FORKED.isdisjoint((command[place], command[place].split(".")[0])) else None


def run_command(command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Become the command: run the module as a new interpreter would, and end this process."""
    take_place(command, environment, folder)
    place = module_of(command)
    assert place is not None, (command, sys.executable)
    name = command[place]
    if "launch.worker" not in name:
        start_children_from_fork()
    open_streams(unbuffered="-u" in command or "PYTHONUNBUFFERED" in environment)
    sys.argv = list(command[place:])
    sys.modules.pop(name, None)
    end_with(partial(runpy.run_module, name, run_name="__main__", alter_sys=True))


def take_place(command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """What a new interpreter finds: environment, directory, handlers of signals, and where it looks for modules."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if constants := sys.modules.get("huggingface_hub.constants"):
        reload(constants)  # which are those of the environment
    show_as(command, environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    added = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.path[:0] = ["", *added]
    invalidate_caches()


def end_with(act: Callable[[], object]) -> None:
    """Do this and end the process as an interpreter does."""
    code = 1
    try:
        act()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def open_streams(*, unbuffered: bool) -> None:
    """The standard streams as a new interpreter opens them: those of this process may remember another kind of file."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in enumerate(("stdout", "stderr"), start=1):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        lines, errors = number == 2 or raw.raw.isatty(), "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def start_children_from_fork() -> None:
    """From now on, `subprocess` starts such commands by a fork. To be called before there are threads."""
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        end_with_parent()
        os.setsid()
        show_as(["fork-server"], {})
        serve(theirs, parent)
    theirs.close()
    execute, server = subprocess.Popen._execute_child, ForkServer(ours)

    def fork_or_execute(
        self: subprocess.Popen, arguments, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        command = [os.fsdecode(word) for word in arguments] if isinstance(arguments, list | tuple) else []
        if preexec_fn is not None or executable or module_of(command) is None:
            execute(self, arguments, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        else:
            server.fork(self, command, pass_fds, cwd, env, rest)

    subprocess.Popen._execute_child = fork_or_execute


class ForkServer:
    """The other end of `serve`."""

    def __init__(self, line: socket.socket, process: subprocess.Popen | None = None) -> None:
        self._line = line
        self._process = process
        self._lock = threading.Lock()

    def fork(
        self, process: subprocess.Popen, command: Sequence[str], pass_fds, cwd, env, rest, *, terminal: bool = False
    ) -> None:
        """Do what `subprocess.Popen._execute_child` does. With `terminal`, the standard input controls the new session."""
        _, _, _, read_in, write_in, read_out, write_out, read_err, write_err, _, _, _, _, _, session, *_ = rest
        streams = [read_in if read_in >= 0 else 0, write_out if write_out >= 0 else 1, write_err if write_err >= 0 else 2]
        order = {
            "command": command,
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()},
            "folder": os.fsdecode(cwd or Path.cwd()),
            "session": bool(session),
            "terminal": terminal,
            "passed": list(pass_fds),
        }
        with self._lock:
            adopt_orphans(True)
            try:
                socket.send_fds(self._line, [json.dumps(order).encode()], [*streams, *pass_fds])
                process.pid = int(self._line.recv(100))
            finally:
                adopt_orphans(False)
        process._child_created = True
        process._close_pipe_fds(read_in, write_in, read_out, write_out, read_err, write_err)

    def close(self) -> None:
        self._line.close()
        if self._process is not None:
            self._process.wait()


def serve(line: socket.socket, parent: int, listener: socket.socket | None = None) -> None:
    """Fork the commands that `ForkServer` asks for, as children of `parent`, until nobody is there to ask.

    At the `listener` it takes the orders of `support.forked_script`.
    """
    while True:
        ready, _, _ = select.select([line, *([listener] if listener else [])], [], [])
        if listener in ready:
            _in_other_process(partial(_run_for_script, listener))
        if line not in ready:
            continue
        text, descriptors, *_ = socket.recv_fds(line, _LONGEST, 16)
        if not text:
            os._exit(0)
        order = json.loads(text)
        child = _in_other_process(partial(_become, line, parent, order, descriptors))
        line.send(str(child).encode())
        for each in descriptors:
            os.close(each)


def _in_other_process(act: Callable[[], None]) -> int:
    """Do this in a process that is not a child of this one. Its number."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (child := os.fork()) == 0:
            os.close(reading)
            os.close(writing)
            try:
                act()
            except BaseException:  # noqa: BLE001 - must not return into the loop
                traceback.print_exc()
            finally:
                os._exit(1)
        os.write(writing, str(child).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    child = int(os.read(reading, 100))
    os.close(reading)
    return child


def _become(line: socket.socket, parent: int, order: dict, descriptors: Sequence[int]) -> None:
    line.close()
    while os.getppid() != parent:  # adopted when the process between has ended
        time.sleep(0.001)
    take_descriptors(descriptors, order["passed"])
    if order["session"]:
        os.setsid()
    if order["terminal"]:
        take_terminal()
    run_command(order["command"], order["environment"], order["folder"])


def _run_for_script(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    text, descriptors, *_ = socket.recv_fds(connection, _LONGEST, 3)
    order = json.loads(text)
    if (child := os.fork()) == 0:
        take_descriptors(descriptors, ())
        site.addsitedir(order["site"])
        run_command(order["command"], order["environment"], order["folder"])
    _, status = os.waitpid(child, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def take_terminal() -> None:
    """Let the standard input be the terminal that controls this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def take_descriptors(descriptors: Sequence[int], passed: Sequence[int]) -> None:
    """These become the standard streams, and the others get the numbers they had; all else is closed."""
    wanted = [0, 1, 2, *passed]
    high = max([*descriptors, *wanted]) + 1
    moved = []
    for each in descriptors:
        moved.append(high)
        os.dup2(each, high)
        high += 1
    for number, each in zip(wanted, moved, strict=True):
        os.dup2(each, number)
    last = 3  # the standard streams are the first of them
    for number in sorted(passed):
        if last < number:
            os.closerange(last, number)
        last = number + 1
    os.closerange(last, 1 << 20)
