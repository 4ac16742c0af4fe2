"""Processes that a check starts: commands of smalti, and ranks on this node or, in a job of SLURM, on several."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).parents[1]
_TAIL = 3000
ROLE = "GPUDAY_ROLE"
"""Variable of each process under test: "tested", or "reference" for what it is compared with."""


class CheckError(Exception):
    """A process of a check has failed; the message ends with the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where checks run. `hardware` is what `gpuday.facts` says, `per_node` the ranks of each node of a cluster."""

    folder: Path
    rehearsed: bool
    hardware: Mapping[str, object]
    per_node: int = 0

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def environment(self, role: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
        repeatable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it, sums of cuBLAS may differ between two runs
        return {**os.environ, **repeatable, "PYTHONPATH": path, ROLE: role}


def command(setting: Setting, words: Sequence[str], log: Path, *, role: str = "tested") -> int:
    """`python -m WORDS` to its end; the exit code. Its output is added to `log`."""
    with log.open("a") as output:
        process = subprocess.run(
            [sys.executable, "-m", *words],
            env=setting.environment(role),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return process.returncode


def checked(setting: Setting, words: Sequence[str], log: Path, *, role: str = "tested") -> None:
    """The same. Raises CheckError for any exit code but 0."""
    if code := command(setting, words, log, role=role):
        raise CheckError(f"{shlex.join(words[:4])} ... ended with exit code {code}\n{tail(log)}")


def start(setting: Setting, words: Sequence[str], log: Path, *, role: str = "tested") -> subprocess.Popen[bytes]:
    """`python -m WORDS` in a session of its own, which `kill` ends."""
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            env=setting.environment(role),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for all of its session, and wait for it."""
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_ranks(
    setting: Setting, module: str, argument: str, log: Path, *, ranks: int, nodes: int = 0, role: str = "tested"
) -> None:
    """Run `python -m MODULE ARGUMENT` on this number of ranks, to their end. Raises CheckError if one fails."""
    if nodes:
        _run_on_nodes(setting, module, argument, log, ranks=ranks, nodes=nodes, role=role)
        return
    port = _free_port()
    started = []
    for rank in range(ranks):
        place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = setting.environment(role) | {name: str(value) for name, value in place.items()}
        with log.with_suffix(f".{rank}.log").open("a") as output:
            words = [sys.executable, "-m", module, argument]
            started.append(
                subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )
    codes = _wait_for_all(started)
    if bad := [rank for rank, code in enumerate(codes) if code]:
        first = bad[0]
        raise CheckError(
            f"rank {first} of {module} ended with exit code {codes[first]}\n{tail(log.with_suffix(f'.{first}.log'))}"
        )


def _wait_for_all(started: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes. When one fails, the others are killed, which would wait for it."""
    codes: dict[int, int] = {}
    while len(codes) < len(started):
        for number, process in enumerate(started):
            if number in codes:
                continue
            try:
                codes[number] = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            if codes[number]:
                for other in started:
                    other.kill()
    failed = [code for _, code in sorted(codes.items()) if code and code != -signal.SIGKILL]
    return [code if code != -signal.SIGKILL or not failed else 0 for _, code in sorted(codes.items())]


_RANK = """\
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={local}
exec {words}"""


def _run_on_nodes(setting: Setting, module: str, argument: str, log: Path, *, ranks: int, nodes: int, role: str) -> None:
    """By srun within the job that this process is in, the ranks on its first nodes."""
    local = -(-ranks // nodes)
    script = _RANK.format(local=local, words=shlex.join([sys.executable, "-m", module, argument]))
    place = {"MASTER_ADDR": address_of(hosts_of_job()[0]), "MASTER_PORT": str(_free_port())}
    with log.open("a") as output:
        code = subprocess.run(
            srun(nodes, script, tasks=ranks),
            env=setting.environment(role) | place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode
    if code:
        raise CheckError(f"srun of {module} on {nodes} nodes ended with exit code {code}\n{tail(log)}")


def srun(nodes: int, script: str, *, tasks: int, hosts: Sequence[str] = ()) -> list[str]:
    """The command that runs a bash script in this number of tasks on these nodes of the job, by default its first ones."""
    chosen = hosts or hosts_of_job()[:nodes]
    words = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={-(-tasks // nodes)}"]
    words += [f"--nodelist={','.join(chosen)}", "--cpu-bind=none", "--overlap", "--no-kill", "--kill-on-bad-exit=0"]
    return ["srun", *words, "bash", "-c", script]


def hosts_of_job() -> list[str]:
    """The nodes of the job of SLURM that this process is in."""
    text = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    ).stdout
    return text.split()


def address_of(host: str) -> str:
    """The address by which SLURM reaches a node."""
    text = subprocess.run(["scontrol", "--oneliner", "show", "node", host], capture_output=True, text=True, check=True).stdout
    return next(word.partition("=")[2] for word in text.split() if word.startswith("NodeAddr="))


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
