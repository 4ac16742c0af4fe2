"""Runs in processes that stand ready. What they compute is what `smalti train` computes; only the imports are paid once.

One process runs the command line as it is. On several ranks the first one does what the command does up to the launch, and each
takes the place of a rank that was launched. How launching itself goes, and what comes of signals and of ranks that fail, is
for runs in processes of their own.
"""

import atexit
import json
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path

from support.forked_ranks import PATIENCE, forked_processes

MOST = 4
IMPORTS = (
    "deepspeed",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
)
"""Imported once for all: each process would take seconds with DeepSpeed, and with what a pipeline of diffusers imports."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WarmProcesses:
    """Up to four processes, started when the first run needs them. They end with this one."""

    def __init__(self) -> None:
        self._ranks = forked_processes(ranks=MOST, group=False, seconds=PATIENCE, imports=IMPORTS)

    def train(self, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
        """`smalti train WORDS`: the exit code, and all that was printed. Raises RankFailed when one of several ranks fails.

        `variables` are added to an environment without settings; modules found on a PYTHONPATH among them are new in each run.
        """
        run = self._ranks.run
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            code, directory, ranks = run(command_line, list(words), dict(variables), place)[0]
            if ranks > 1:
                run(rank, directory, dict(variables), place, ranks, _free_port())
                word = json.loads((place / "rank-0.json").read_text())
                code, said = word["exit_code"], word["message"]
                (place / "5.log").write_text(f"{said}\n")
            return code, "".join(path.read_text() for path in sorted(place.glob("*.log")))

    def close(self) -> None:
        self._ranks.close()


@cache
def warm_processes() -> WarmProcesses:
    """The ones of this test process."""
    found = WarmProcesses()
    atexit.register(found.close)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- in the processes -----------------------------------------------------------------------------------------------

_PLACE = int(os.environ.get("RANK", "0"))


class _Nothing:
    """In place of a process that would start ranks: nothing is launched."""

    def close(self) -> None: ...


def command_line(words: list[str], variables: dict[str, str], place: Path) -> tuple[int, str, int]:
    """In the first process: `smalti train`, to its end if it starts no other process.

    Else up to the launch, when it has left its files in the run directory. The exit code, the directory, and how many ranks
    wait to be launched.
    """
    if _PLACE > 0:
        return 0, "", 0
    from smalti.cli.entry import main
    from smalti.launch.preflight import Preparation, write_launch_files

    waiting: list[tuple[str, int]] = []

    def launch(self: Preparation, standby: object) -> int:
        if self.plan.launcher == "in-process":
            return ordinary(self, standby)
        write_launch_files(self.directory, self.config, self.site.plugins, self.plan)
        if self.site.writer is not None:
            self.site.writer.close()  # the first rank takes the directory itself
        waiting.append((str(self.directory.path), len(self.plan.ranks)))
        return 0

    standby = import_module("smalti.launch.standby")
    starter, standby.StandbyLauncher = standby.StandbyLauncher, _Nothing
    ordinary, Preparation.launch = Preparation.launch, launch
    try:
        with _as_if_new(variables, place / "0.log"):
            code = _exit_code(main, ["train", *words])
    finally:
        Preparation.launch = ordinary
        standby.StandbyLauncher = starter
    return code, *(waiting[0] if waiting else ("", 0))


def rank(directory: str, variables: dict[str, str], place: Path, ranks: int, port: int) -> None:
    """In each process: one of the ranks that were launched."""
    if ranks <= _PLACE:
        return
    from smalti.launch.worker import main

    values = map(str, (_PLACE, _PLACE, ranks, ranks, "127.0.0.1", port))
    launched = dict(zip(_OF_A_RANK, values, strict=True)) | {"SMALTI_OUTCOME_DIR": str(place)}
    with _as_if_new(variables | launched, place / f"{_PLACE + 1}.log"):
        main([directory])


def _exit_code(main: Callable[[list[str]], None], arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextmanager
def _as_if_new(variables: Mapping[str, str], output: Path) -> Iterator[None]:
    """This process as a new one would be: with these variables, its output in a file, and nothing left of the run before."""
    with _environment(variables), _modules_of(variables.get("PYTHONPATH", "")), _output_in(output), warnings.catch_warnings():
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        logging.root.handlers.clear()
        yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SMALTI_", "ACCELERATE_")) or name in _OF_A_RANK:
            del os.environ[name]
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be among them
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


@contextmanager
def _modules_of(folders: str) -> Iterator[None]:
    """What lies in these folders can be imported, and is forgotten afterwards."""
    found = [folder for folder in folders.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[:0] = found
    invalidate_caches()
    try:
        yield
    finally:
        del sys.path[: len(found)]
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(tuple(f"{folder}{os.sep}" for folder in found)):
                del sys.modules[name]


@contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Whatever goes to the terminal, also from compiled code."""
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        _point_at(file.fileno(), file.fileno())
    try:
        yield
    finally:
        _point_at(*kept)
        for descriptor in kept:
            os.close(descriptor)


def _point_at(out: int, err: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)
