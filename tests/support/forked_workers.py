"""`python tests/support/forked_workers.py WORKERS WORDS`: `pytest WORDS` with workers that start at once.

One process imports what is not ours and takes seconds. Workers are forked from it, and what they fork ranks from.
To them only one thing is different: these modules have been imported. Modules of smalti have not. What commands are forked from
(`support.forked_popen`) is a new process, a child of its worker: what the libraries print at import is for tests to see.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_module
from types import ModuleType

VARIABLE = "TEST_IMPORTED"
"""The address of the process that has made the imports."""
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
)
_LONGEST, _FILES = 1 << 18, 64
_KNOWN = "ignore:Module already imported so cannot be rewritten; anyio:pytest.PytestAssertRewriteWarning"
"""It is a plugin of pytest, whose assertions are not those of tests."""


def python() -> list[str]:
    """How a command begins that is executed by Python: in such a process where there is one."""
    address = os.environ.get(VARIABLE)
    client = Path(__file__).with_name("imported_python.py")
    return [sys.executable, *(["-I", "-S", str(client), address] if address else [])]


def main(workers: str, *words: str) -> None:
    gc.disable()  # imports make hardly any garbage
    for name in IMPORTS:
        import_module(name)
    gc.freeze()
    address = f"smalti-tests-imported-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        if os.fork() == 0:
            serve(listener)
    gc.enable()
    os.environ[VARIABLE] = address
    sys.path[0] = str(Path.cwd())  # as for `python -m pytest`
    import pytest

    sys.exit(pytest.main(["--tx", f"{workers}*popen//python={shlex.join(python())}", "-W", _KNOWN, *words]))


def serve(listener: socket.socket) -> None:
    """Fork what `imported_python.py` asks for, until the process that runs pytest ends."""
    from support.nodes.forked_commands import end_with_parent

    end_with_parent()
    os.setsid()
    del sys.path[0]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            fork_one(connection)
        connection.close()


def fork_one(connection: socket.socket) -> None:
    """In a process between: the fork, and what comes of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, descriptors, *_ = socket.recv_fds(connection, _LONGEST, _FILES)
    order = json.loads(text)
    if (child := os.fork()) == 0:
        try:
            run(order, descriptors)
        finally:
            os._exit(1)
    for each in descriptors:
        os.close(each)
    _, status = os.waitpid(child, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(order: dict, descriptors: Sequence[int]) -> None:
    """Become the command, and end this process."""
    from support.nodes.forked_commands import end_with, open_streams, take_descriptors, take_place

    os.setsid()
    gc.enable()
    take_descriptors(descriptors, order["passed"])
    take_place(order["command"], order["environment"], order["folder"])
    open_streams(unbuffered="-u" in order["command"])
    _, kind, what, *words = (word for word in order["command"] if word != "-u")
    sys.argv = [kind, *words]
    sys.modules["__main__"] = module = ModuleType("__main__")
    code = partial(exec, what, vars(module)) if kind == "-c" else partial(run_module, what, run_name="__main__", alter_sys=True)
    end_with(code)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # where `support` is found
    main(*sys.argv[1:])
