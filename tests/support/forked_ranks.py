"""Ranks that start at once: one process makes the imports that take seconds, and ranks are forked from it when tests want them.

    with forked_processes(group=False) as pair:
        pair.run(function)                       as with `smalti_testing.two_processes`, which starts each rank anew

To a rank only two things are different: modules of all runs have been imported already, and those that the test names; and its
environment is in force from then on, not from the start of the process. Tests to which that matters start their ranks anew.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import ClassVar

import psutil

from smalti.types import World
from smalti_testing.pytest import ParallelContract
from smalti_testing.ranks import RankProcesses
from support.forked_workers import python
from support.imports import enable_garbage_collection, import_for_runs

HEAVY = ("smalti_testing.rank", "smalti_testing.strategies")
PATIENCE = 480.0
"""Seconds after which a call is given up: many times what any takes on two cores that have other work as well."""
_LONGEST_ORDER = 2**20


class Forked(RankProcesses):
    """`RankProcesses` that are killed in the end, which takes less time than leaving."""

    def __init__(self, size: int, *, group: bool, seconds: float, imports: Sequence[str], module: str) -> None:
        super().__init__(size, group=group, seconds=seconds)
        self._imports = imports
        self._module = module

    def _open(self, environment: Mapping[str, str], line: int, output: int) -> Child:
        life = {"environment": dict(environment), "folder": str(Path.cwd()), "group": self._group}
        return Child(fork_server(self._module).fork(line, output, imports=self._imports, life=life))

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()


def forked_processes(
    *,
    ranks: int = 2,
    group: bool = True,
    seconds: float = PATIENCE,
    imports: Sequence[str] = (),
    module: str = "support.forked_ranks",
) -> Forked:
    """Ranks to use in a `with` statement; see `two_processes`.

    `imports`: more modules that are imported once for all. `module`: what the process runs from which they are forked, which
    calls `main` of this module in the end.
    """
    return Forked(ranks, group=group, seconds=seconds, imports=imports, module=module)


class SingleRank:
    """`smalti.parallel.Communicator` of one process."""

    world = World()

    def all_gather_text(self, value: str) -> list[str]:
        return [value]


class Pair:
    """`smalti.parallel.Communicator` of one of two processes in a group."""

    def __init__(self, rank: int) -> None:
        self.world = World(rank=rank, size=2)

    def all_gather_text(self, value: str) -> list[str]:
        import torch.distributed as dist

        answers = ["", ""]
        dist.all_gather_object(answers, value)
        return answers


class ForkedContract(ParallelContract):
    """The contract of strategies, checked on such ranks. `imports`: more modules that are imported once for all."""

    imports: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def setup_class(cls) -> None:
        seconds = max(cls.seconds, PATIENCE)
        cls._processes = forked_processes(ranks=cls.ranks, group=False, seconds=seconds, imports=cls.imports)


class Child:
    """What `RankProcesses` asks of a process, for one that is not this process's own child: its status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        return None if self._process.is_running() else -1

    def wait(self) -> int:
        self._process.wait()
        return -1

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


class ForkServer:
    """The process that has made the imports, running `python -m MODULE`. It ends with this one."""

    def __init__(self, module: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        helpers = [folder for folder in sys.path if Path(folder).name == "tests"]  # those that tests of packages use too
        path = os.pathsep.join(filter(None, (*helpers, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [*(python() if module == __name__ else [sys.executable]), "-m", module, str(theirs.fileno())],
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, line: int, output: int, **order: object) -> int:
        """The process id of a new rank with these two descriptors, by the order that `main` takes."""
        socket.send_fds(self._line, [json.dumps(order).encode()], [line, output])
        return int(self._line.recv(100))

    def close(self) -> None:
        self._line.close()
        self._process.wait()


@cache
def fork_server(module: str) -> ForkServer:
    """The one of this test process that runs this module."""
    server = ForkServer(module)
    atexit.register(server.close)
    return server


# --- in that process ------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork ranks until nobody is there to ask for them. In a rank, return when it has done its work."""
    gc.disable()  # imports make hardly any garbage
    import_for_runs()
    for name in HEAVY:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    with socket.socket(fileno=descriptor) as line:
        while True:
            order, descriptors, *_ = socket.recv_fds(line, _LONGEST_ORDER, 2)
            if not order:
                return
            wanted = json.loads(order)
            for name in wanted["imports"]:
                import_module(name)
            gc.freeze()  # so that ranks need not go through all that was imported
            if (child := os.fork()) == 0:
                break
            line.send(str(child).encode())
            for each in descriptors:
                os.close(each)
    run_as_rank(*descriptors, **wanted["life"])


def run_as_rank(line: int, output: int, environment: Mapping[str, str], folder: str, group: bool) -> None:
    """As the process that `smalti_testing.ranks` would have started."""
    from smalti_testing.rank import main

    enable_garbage_collection()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    invalidate_caches()
    main(line, group)


if __name__ == "__main__":
    main(int(sys.argv[1]))
