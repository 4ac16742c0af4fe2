"""`smalti doctor --nodes --hosts=a,b,c`: starts the checks on these hosts over ssh, and shows what node 0 prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import click

from smalti import ExitCode, PreflightError, UserError

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_NO_CONNECTION = 255
"""The exit code of ssh if it cannot connect or log in."""
_WAIT_SECONDS = 60
_END_SECONDS = 10.0


def check_hosts(hosts: Sequence[str], words: Sequence[str], *, ssh: str, as_json: bool, measure: bool) -> int:
    """Run `smalti doctor --nodes` on each host, in this folder and with this Python. Returns the exit code of node 0.

    `ssh` is a command to which host and command are appended. Raises PreflightError if a host cannot be reached.
    """
    names = [host.strip() for host in hosts if host.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"--hosts={','.join(hosts)} does not name several hosts", fix="--hosts=a,b,c, each of them once")
    try:
        prefix = shlex.split(ssh)
    except ValueError as error:
        raise UserError(f"--ssh_command={ssh} cannot be read: {error}", fix="quote it as for a shell") from error
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(names):
            command = [*prefix, host, _remote(words, names, rank, as_json=as_json, measure=measure)]
            processes.append(_start(command, first=rank == 0))
        readers = [_relay(process.stderr, host) for process, host in zip(processes, names, strict=True)]
        return _wait(processes, names, readers)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _start(command: Sequence[str], *, first: bool) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if first else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        message = f"cannot start {command[0]}: {error.strerror or error}"
        raise PreflightError(message, fix="install an ssh client, or give --ssh_command") from error


def _remote(words: Sequence[str], hosts: Sequence[str], rank: int, *, as_json: bool, measure: bool) -> str:
    """The command on a host, quoted for its shell. Arguments of the user come last, so that they count."""
    own = [
        f"--num_machines={len(hosts)}",
        f"--machine_rank={rank}",
        *(["--json"] if as_json else []),
        *(["--measure"] if measure else []),
    ]
    given = {word.partition("=")[0].replace("-", "_") for word in words}
    if "__main_process_ip" not in given:
        own.append(f"--main_process_ip={hosts[0].rpartition('@')[2]}")
    if "__rendezvous_timeout" not in given:
        own.append(f"--rendezvous_timeout={_WAIT_SECONDS}")
    command = [sys.executable, "-m", "smalti", "doctor", "--nodes", *words, *own]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(command)}"


def _relay(stream: IO[bytes] | None, host: str) -> tuple[threading.Thread, list[str]]:
    """A thread that prints what a host writes to standard error, after its name; and its last lines."""
    lines: list[str] = []

    def read() -> None:
        for data in stream or ():
            line = data.decode(errors="replace").rstrip()
            lines.append(line)
            click.echo(f"{host}: {line}", err=True)

    thread = threading.Thread(target=read, name=f"output of {host}", daemon=True)
    thread.start()
    return thread, lines


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], hosts: Sequence[str], readers: Sequence[tuple[threading.Thread, list[str]]]
) -> int:
    output: list[bytes] = []
    first = processes[0].stdout
    assert first is not None
    reader = threading.Thread(target=lambda: output.append(first.read()), name="report", daemon=True)
    reader.start()
    while processes[0].poll() is None:
        _raise_if_unreachable(processes, hosts, readers)
        time.sleep(0.1)
    reader.join(_END_SECONDS)
    _raise_if_unreachable(processes, hosts, readers)
    deadline = time.monotonic() + _END_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for thread, _ in readers:
        thread.join(1.0)
    click.echo(b"".join(output).decode(errors="replace"), nl=False)
    code = processes[0].returncode
    return code if code >= 0 else int(ExitCode.KILLED)


def _raise_if_unreachable(
    processes: Sequence[subprocess.Popen[bytes]], hosts: Sequence[str], readers: Sequence[tuple[threading.Thread, list[str]]]
) -> None:
    for process, host, (thread, lines) in zip(processes, hosts, readers, strict=True):
        if process.poll() in (_NO_CONNECTION, 126, 127):
            thread.join(1.0)
            reason = next((line for line in reversed(lines) if line), f"exit code {process.returncode}")
            message = f"smalti cannot be started on {host}: {reason}"
            fix = f"check that `ssh {host}` needs no password, and that {sys.executable} and {Path.cwd()} exist there"
            raise PreflightError(message, fix=fix)
