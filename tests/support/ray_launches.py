"""Runs on a real Ray cluster, each with a driver of its own, and what can be lost while they train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from smalti.rundir import RunDirectory
from support.forked_popen import run_forked
from support.images import images_in
from support.nodes.runs import TINY
from support.raylets import Raylets, environment

LOSSES = ("worker", "raylet", "driver", "drained node")


def words(folder: Path, name: str, **options: object) -> list[str]:
    """Arguments of a run in the folder `name`; only `max_train_steps` has no default."""
    data = {"instance_data_dir": images_in(folder / "images", 12, (24, 24)), "output_dir": folder / name}
    values = {**TINY, **data, "checkpoint_step_interval": 20, **options}
    return [f"--{option}={value}" for option, value in values.items()]


class Launch:
    """A driver in a process of its own."""

    def __init__(self, raylets: Raylets, folder: Path, name: str, *flags: str, **options: object) -> None:
        self.directory = RunDirectory(folder / name)
        self.log = folder / f"{name}.log"
        self._command = [
            *(sys.executable, "-m", "smalti", "launch", "ray", *words(folder, name, **options)),
            *(f"--address={raylets.address}", *flags),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True, env=environment())

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while (last := self.directory.latest("step")) is None or (last.step or 0) < step:
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def code(self, seconds: float = 400) -> int:
        return self.process.wait(seconds)

    def worker(self, number: int) -> psutil.Process:
        """The process of a worker that trains, by the number of its node in the group."""
        wanted = {"smalti_ray.launch.process", f"--output_dir={self.directory.path}", f"--machine_rank={number}"}
        return next(each for each in psutil.process_iter(["cmdline"]) if wanted <= {*(each.info["cmdline"] or ())})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block the ranks stand still."""
        ranks = [each for each in psutil.process_iter(["cmdline"]) if self._is_rank(each.info["cmdline"] or ())]
        for each in ranks:
            each.suspend()
        try:
            yield
        finally:
            for each in ranks:
                with suppress(psutil.NoSuchProcess):
                    each.resume()

    def _is_rank(self, command: Sequence[str]) -> bool:
        return "smalti.launch.worker" in command and str(self.directory.path) in command

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def local(folder: Path, **options: object) -> RunDirectory:
    """Two ranks of this machine, to their end."""
    command = [sys.executable, "-m", "smalti", "train", *words(folder, "local", num_processes=2, **options)]
    run_forked(command, timeout=400, env=environment()).check_returncode()
    return RunDirectory(folder / "local")


def tensors(directory: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights, optimizer, EMA."""
    folder = directory.checkpoints / f"step-{step:08d}"
    paths = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)} {name}": value for path in paths for name, value in load_file(path).items()}


def lose(what: str, raylets: Raylets, launch: Launch) -> None:
    """The ranks wait for it: all steps take them seconds, and what is slow on a busy machine is this process."""
    with launch.paused():
        number, worker = raylets.worker()
        if what == "worker":
            worker.kill()
        elif what == "raylet":
            raylets.kill(number)
        elif what == "driver":
            os.killpg(launch.process.pid, signal.SIGKILL)
            launch.process.wait()
            launch.start()
        elif what == "drained node":
            raylets.drain(number)
