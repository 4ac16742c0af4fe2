"""`ForkedPopen`: `subprocess.Popen` for tests that launch `smalti`, without the time that the imports take.

The process is forked from one that has made them (`support.nodes.forked_commands`), and so are the agent and the ranks that it
launches. They are processes of their own in all else: signals, exit codes, parents, sessions, streams, environment, /proc.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from support.nodes.forked_commands import ForkServer, import_heavy, module_of, serve, take_terminal
from support.nodes.namespaces import can_show

_FIRST = threading.Lock()


class ForkedPopen(subprocess.Popen):
    """For `python -m smalti...` and torch's launcher.

    Other commands are executed, and all where a fork cannot look like its command in /proc.

    With `terminal`, the standard input is the terminal that controls the session, which must be a new one.
    """

    def __init__(self, command: Sequence[str], *, terminal: bool = False, **options) -> None:
        self._terminal = terminal
        super().__init__(command, **options)

    def _execute_child(self, arguments, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        command = [os.fspath(word) for word in arguments]
        if not can_show() or module_of(command) is None:
            take = take_terminal if self._terminal else None
            super()._execute_child(arguments, executable, take, close_fds, pass_fds, cwd, env, *rest)
        else:
            with _FIRST:
                server = fork_server()
            server.fork(self, command, pass_fds, cwd, env, rest, terminal=self._terminal)


def run_executed(command: Sequence[str], *, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command, with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)


def run_forked(command: Sequence[str], *, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
    """The same for `python -m smalti...`, without the time of the imports."""
    with ForkedPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@cache
def fork_server() -> ForkServer:
    """The one of this test process. It ends with it."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.forked_popen", str(theirs.fileno()), str(os.getpid())],
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = ForkServer(line, process)
    atexit.register(server.close)
    return server


def forked_script(site: Path) -> str:
    """A shell script that does what `python -m smalti` does where the packages of the folder `site` are installed too."""
    with _FIRST:
        fork_server()
    client = Path(__file__).with_name("forked_script.py")
    return f'#!/bin/sh\nexec "{sys.executable}" -I -S "{client}" {_address(os.getpid())} "{site}" "$@"\n'


def _address(pid: int) -> str:
    return f"smalti-tests-{pid}"


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{_address(int(sys.argv[2]))}")
        listener.listen()
        gc.disable()  # imports make hardly any garbage
        import_heavy()
        gc.freeze()
        gc.enable()
        serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), listener)
