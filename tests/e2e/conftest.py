"""Real runs for the tests: a small data set, and `smalti train` as a user starts it, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from PIL import Image, ImageDraw

from smalti.launch.launcher import kill_tree
from smalti.rundir.directory import RunDirectory
from support.forked_popen import ForkedPopen, run_executed, run_forked
from support.processes import send_signal, workers
from support.warm_processes import warm_processes

PROBE = Path(__file__).parent / "probe"
TINY = {
    "model_family": "toy",
    "toy_width": 32,
    "toy_depth": 2,
    "toy_heads": 2,
    "resolution": 16,
    "resolution_type": "pixel",
    "mixed_precision": "no",
    "learning_rate": 1e-3,
    "checkpoint_step_interval": 0,
    "without": "plots",  # which takes longer to import than these runs train
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Twenty-four pictures in two shapes, with captions."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(24):
        size = (32, 32) if number % 3 else (48, 24)
        image = Image.new("RGB", size, (number * 10, 255 - number * 10, 128))
        ImageDraw.Draw(image).ellipse((4, 4, 12 + number % 9, 20), fill=(255, 255, 255))
        image.save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"circle number {number}")
    return folder


@dataclass
class Finished:
    """A run that has ended."""

    directory: Path
    code: int
    output: str
    calls_file: Path

    @classmethod
    def of(cls, directory: Path, code: int, output: str) -> "Finished":
        return cls(directory=directory, code=code, output=output, calls_file=directory.with_suffix(".calls"))

    def events(self, kind: str) -> list[dict]:
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def calls(self, hook: str, rank: int | None = None) -> list[dict]:
        """What the probe noted of a hook."""
        return [call for call in self.all_calls() if call["hook"] == hook and rank in (None, call["rank"])]

    def all_calls(self) -> list[dict]:
        """What the probe noted, in order."""
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def tensors(self, step: int, group: str) -> dict:
        """All tensors of one group of a checkpoint of this run."""
        from safetensors.torch import load_file

        folder = self.directory / "checkpoints" / f"step-{step:08d}" / group
        return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def words(pictures: Path, directory: Path, *, config: Path | None = None, **options) -> list[str]:
    """What follows `smalti train`; of the toy family, where no configuration file says otherwise. None leaves an option out."""
    values = {**(TINY if config is None else {}), "instance_data_dir": pictures, "output_dir": directory, **options}
    flags = []
    for name, value in values.items():
        if value is None:
            continue
        flags += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return [*([] if config is None else [str(config)]), *flags]


def command(pictures: Path, directory: Path, **options) -> list[str]:
    return [sys.executable, "-m", "smalti", "train", *words(pictures, directory, **options)]


def of_the_run(directory: Path, *, probe: bool) -> dict[str, str]:
    """The environment variables of a run."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))} if probe else {}
    return {**path, "PROBE_CALLS": str(directory.with_suffix(".calls")), "HF_HOME": str(directory.parent / "hf")}


def environment(directory: Path, *, probe: bool, **more: str) -> dict[str, str]:
    """All of the environment of a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SMALTI_", "PROBE_"))}
    return {**inherited, "OMP_NUM_THREADS": "1", **of_the_run(directory, probe=probe), **more}


@contextmanager
def starting(pictures: Path) -> Iterator[Callable[..., "Started"]]:
    """Start runs and return at once, to watch, ask and signal them. They are killed when this is over."""
    started = []

    def begin(
        directory: Path, *, terminal: int | None = None, variables: dict | None = None, probe: bool = False, **options
    ) -> Started:
        process = ForkedPopen(
            command(pictures, directory, **options),
            env=environment(directory, probe=probe, **(variables or {})),
            stdin=terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=terminal is not None,
            terminal=terminal is not None,
        )
        started.append(process)
        return Started(directory, process)

    yield begin
    for process in started:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def start(pictures):
    """Start a run that lasts as long as the test, at most: start(directory, option=value, ...).

    `terminal` is the descriptor of one that becomes its terminal.
    """
    with starting(pictures) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_module(pictures):
    """The same, for what the tests of a module share."""
    with starting(pictures) as begin:
        yield begin


@dataclass
class Started:
    """A run that goes on."""

    directory: Path
    process: subprocess.Popen

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        """Until the events tell of this step; an error with the output if the run ends before."""
        deadline, run = time.monotonic() + seconds, RunDirectory(self.directory)
        while (last := run.latest("step")) is None or (last.step or 0) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                kill_tree(self.process.pid)
                raise RuntimeError(f"step {step} never came: {self.process.communicate()[0]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9` of the launcher and every process below it, none of which can say goodbye; until all are gone."""
        parent = psutil.Process(self.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        send_signal(signal.SIGKILL, processes)
        psutil.wait_procs(processes, timeout=60)
        self.process.wait()

    def workers(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by rank."""
        return workers(self.process.pid)

    def wait(self) -> tuple[int, str]:
        """Its exit code and all that it printed."""
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output


@pytest.fixture(scope="session")
def launch(pictures):
    """Start a run and wait for its end, as `train` does, in new processes that `smalti train` launches itself.

    For what `train` cannot show: launching, failures on one of several ranks, what a run as a whole prints. The words `before`
    the command are a program that runs it. The processes are forked (`support.forked_popen`), unless they are to be `executed`.
    """

    def start(
        directory: Path,
        *,
        before: Sequence[str] = (),
        spoil: str = "",
        probe: bool = True,
        variables: dict | None = None,
        executed: bool = False,
        dry: bool = False,
        **options,
    ) -> Finished:
        finished = (run_executed if executed else run_forked)(
            [*before, *command(pictures, directory, **options), *(["--dry-run"] if dry else [])],
            env=environment(directory, probe=probe, PROBE_SPOIL=spoil, **(variables or {})),
            timeout=240,
        )
        return Finished.of(directory, finished.returncode, finished.stdout + finished.stderr)

    return start


@pytest.fixture(scope="session")
def train(pictures):
    """A run to its end, in processes that stand ready: train(directory, option=value, ..., spoil="nan:1:3"). Or a `dry` one."""

    def start(
        directory: Path,
        *,
        spoil: str = "",
        tracker: str = "",
        probe: bool = True,
        variables: dict | None = None,
        dry: bool = False,
        **options,
    ) -> Finished:
        given = {"PROBE_SPOIL": spoil, "PROBE_TRACKER": tracker, **of_the_run(directory, probe=probe), **(variables or {})}
        flags = [*words(pictures, directory, **options), *(["--dry-run"] if dry else [])]
        return Finished.of(directory, *warm_processes().train(flags, given))

    return start
