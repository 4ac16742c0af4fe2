"""Several real processes that stand ready: started once, they run one function after another, all of them together.

    with two_processes() as pair:
        sums = pair.run(add_over_ranks, 3)      # one answer from each rank, in their order

A function must stand in a module or a file of its own right, not inside another function, and its arguments and its answer
must be picklable. A rank that fails, hangs or dies costs only the function that it was running: the processes are started
again for the next one. Nothing is left running when the `with` ends, nor when this process is killed.

Imports no torch; the ranks do.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_START_SECONDS = 120.0
_GRACE_SECONDS = 5.0
"""How long the other ranks may take to notice that one has failed."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank made of a function: `value`, or `error` with the traceback or the reason why there is none."""

    rank: int
    value: object = None
    error: str = ""


class RankFailed(AssertionError):  # noqa: N818
    """A function failed on some rank. The message holds each rank's traceback; `results` what every rank returned."""

    def __init__(self, function: str, results: Sequence[RankResult]) -> None:
        self.results = tuple(results)
        reports = [f"--- rank {result.rank}: {result.error.rstrip() or 'done'}" for result in results]
        super().__init__("\n".join([f"{function} failed", *reports]))


@dataclass(kw_only=True)
class _Rank:
    """One process, our end of the line to it, and the file that takes its output."""

    process: subprocess.Popen[bytes]
    line: Connection
    output: Path


def two_processes(*, ranks: int = 2, group: bool = True, seconds: float = 60.0) -> RankProcesses:
    """Ranks to use in a `with` statement.

    Args:
        ranks: how many; two unless you need more.
        group: join them in a gloo process group. False for what joins one itself, as a `Parallel` does: they have the
            environment of a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT ...) and no group.
        seconds: how long a function may take.
    """
    return RankProcesses(ranks, group=group, seconds=seconds)


class RankProcesses:
    """Processes that run functions together. Made by `two_processes`; started when first needed."""

    def __init__(self, size: int, *, group: bool, seconds: float) -> None:
        self.size = size
        self._group = group
        self._seconds = seconds
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="smalti-ranks-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> list[T]:
        """Call `function` on every rank; their answers in rank order. Raises RankFailed when it failed on any of them."""
        results = self.attempt(function, *arguments, **keywords)
        if any(result.error for result in results):
            raise RankFailed(f"{function.__module__}.{function.__qualname__}", results)
        return [cast(T, result.value) for result in results]

    def attempt(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> list[RankResult]:
        """The same without raising: what each rank made of it."""
        if any(rank.process.poll() is not None for rank in self._ranks):
            self._kill()
        if not self._ranks:
            self._start()
        order = (function.__module__, function.__qualname__, inspect.getfile(function), arguments, keywords)
        results: list[RankResult] = []
        try:
            for rank in self._ranks:
                rank.line.send(order)
            results = self._collect(self._seconds)
        finally:
            # Whoever failed has left the others in the middle of something; without results, their answers are still to come.
            if not results or any(result.error for result in results):
                self._kill()
        return results

    def close(self) -> None:
        """End the processes; called by the `with` statement."""
        for rank in self._ranks:
            with suppress(OSError):  # it has ended by itself
                rank.line.send(None)
        deadline = time.monotonic() + _GRACE_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        self._kill()
        self._folder.cleanup()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for number in range(self.size):
            self._ranks.append(self._start_one(number, port))
        results = self._collect(_START_SECONDS)
        if any(result.error for result in results):
            self._kill()
            raise RankFailed("starting the ranks", results)

    def _start_one(self, number: int, port: int) -> _Rank:
        ours, theirs = Pipe()
        environment = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        output = Path(self._folder.name) / f"rank-{number}.log"
        with theirs, output.open("wb") as file:
            process = self._open({"OMP_NUM_THREADS": "1", **os.environ, **environment}, theirs.fileno(), file.fileno())
        return _Rank(process=process, line=ours, output=output)

    def _open(self, environment: Mapping[str, str], line: int, output: int) -> subprocess.Popen[bytes]:
        """A new rank in a session of its own: it takes orders from the descriptor `line` and prints to `output`."""
        return subprocess.Popen(
            [sys.executable, "-m", "smalti_testing.rank", str(line), "group" if self._group else "no-group"],
            env=environment,
            pass_fds=(line,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _collect(self, seconds: float) -> list[RankResult]:
        """One result from each rank, in time; once one has failed, the others have a few seconds left."""
        deadline = time.monotonic() + seconds
        waiting = {rank.line: number for number, rank in enumerate(self._ranks)}
        found: dict[int, RankResult] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                line = cast(Connection, ready)
                number = waiting.pop(line)
                found[number] = self._receive(number)
                if found[number].error:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for number in waiting.values():
            found[number] = RankResult(rank=number, error=f"no answer in time; it stands here:\n{self._where(number)}")
        return [found[number] for number in sorted(found)]

    def _receive(self, number: int) -> RankResult:
        rank = self._ranks[number]
        try:
            value, error = rank.line.recv()
        except EOFError:
            status = rank.process.wait()
            return RankResult(rank=number, error=f"ended with status {status}; its last output:\n{_tail(rank.output)}")
        return RankResult(rank=number, value=value, error=error)

    def _where(self, number: int) -> str:
        """Where a rank is that does not answer: it writes its stack into its output on request."""
        rank = self._ranks[number]
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        return _tail(rank.output)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            rank.line.close()
        self._ranks.clear()


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-30:])
