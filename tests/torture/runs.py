"""A8, A9: real runs, killed until they are done, or asked to stop by signals at random moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import psutil

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.system import kill_tree
from support.images import images_in
from support.processes import living, workers

from .subject import Report

OPTIONS = (
    "--model_family=toy",
    "--toy_width=32",
    "--toy_depth=2",
    "--toy_heads=2",
    "--resolution=16",
    "--resolution_type=pixel",
    "--mixed_precision=no",
    "--use_ema",
    "--checkpoint_step_interval=1",
    "--checkpoints_total_limit=2",
    "--lr_scheduler=cosine",
)


def start(
    place: Path, name: str, ranks: int, steps: int, *, sharded: bool = False, more: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    words = [
        f"--instance_data_dir={images_in(place / 'images', 12, (24, 24))}",
        f"--output_dir={place / name}",
        f"--max_train_steps={steps}",
    ]
    words += [f"--num_processes={ranks}", f"--train_batch_size={4 // ranks}", "--without=plots"]
    words += ["--fsdp_enable"] if sharded else []
    return launch(place, name, [*words, *more])


def launch(place: Path, name: str, words: list[str], *, options: Sequence[str] = OPTIONS) -> subprocess.Popen[bytes]:
    """Start a run with these options, by default of the toy family; it writes into the file `name`.log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "hf")}
    with (place / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "smalti", "train", *options, *words], env=environment, stdout=log, stderr=log
        )


def tensors(place: Path, name: str) -> dict[str, bytes]:
    """The newest checkpoint's tensors, put together from the pieces of all ranks."""
    path = CheckpointStore(place / name / "checkpoints").latest()
    assert path is not None
    found = {}
    for group in ("model", "optimizer", "ema"):
        files = TensorFiles(sorted((path / group).glob("*.safetensors")))
        found |= {f"{group}/{key}": bytes(files.read(key)) for key in files.tensors}
    return found


def resumed(chance: Random, place: Path) -> Report:
    """A8: killed at random moments, and started again until done: bit for bit the undisturbed run.

    On one rank, on two with DDP or with FSDP2; all processes are killed, or one of two ranks.
    """
    ranks, sharded = chance.choice(((1, False), (2, False), (2, True), (2, True)))
    return _resumed(chance, place, ranks, sharded=sharded, kills=12, delay=lambda: chance.uniform(0, 1.5))


def resumed_once(chance: Random, place: Path) -> Report:
    """A8 in short: one rank, killed once."""
    return _resumed(chance, place, 1, kills=1, delay=lambda: chance.uniform(0, 0.1), steps=20)


def _resumed(
    chance: Random,
    place: Path,
    ranks: int,
    *,
    kills: int,
    delay: Callable[[], float],
    steps: int = 40,
    sharded: bool = False,
) -> Report:
    """Each kill comes a `delay` after the first checkpoint of a start."""
    report, told = Report(), f"{ranks} {'sharded ' if sharded else ''}ranks"
    report.expect(start(place, "whole", ranks, steps, sharded=sharded).wait(300) == 0, "the undisturbed run fails")
    while True:
        process = start(place, "killed", ranks, steps, sharded=sharded)
        wait_for_saves(place / "killed", process)
        try:
            code = process.wait(delay())
        except subprocess.TimeoutExpired:
            kill(chance, process, ranks)
            report.faults += 1
            if report.faults < kills:
                continue
            code = start(place, "killed", ranks, steps, sharded=sharded).wait(300)
        report.expect(code == 0, f"a resumed run on {told} ends with {code}: {tail(place, 'killed')}")
        break
    expected, found = tensors(place, "whole"), tensors(place, "killed")
    different = [name for name in expected if expected[name] != found.get(name)]
    report.expect(not different, f"after {report.faults} kills on {told} these differ: {different[:5]}")
    return report


def kill(chance: Random, process: subprocess.Popen[bytes], ranks: int) -> None:
    """SIGKILL to everything of a run, or to one of several ranks, after which the others have to end by themselves."""
    try:
        found = list(workers(process.pid).values())
        if ranks > 1 and found and chance.random() < 0.5:
            chance.choice(found).kill()
            process.wait(120)
            return
    except psutil.NoSuchProcess:
        pass  # it is ending by itself
    kill_tree(process.pid)
    process.wait()


def wait_for_saves(directory: Path, process: subprocess.Popen[bytes]) -> None:
    """Until this start of the run has made a checkpoint, so that every start gets further."""
    begun = {path.name for path in (directory / "checkpoints").glob("step-*")}
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if {path.name for path in (directory / "checkpoints").glob("step-*")} - begun:
            return
        time.sleep(0.02)


def tail(place: Path, name: str) -> str:
    return (place / f"{name}.log").read_text()[-400:]


def stopped(chance: Random, place: Path) -> Report:
    """A9: SIGTERM or SIGINT, once or twice, at a random moment: a whole checkpoint, the right exit code, nobody left."""
    ranks, number = chance.choice((1, 2)), chance.choice((signal.SIGTERM, signal.SIGINT))
    return _stopped(chance, place, ranks, number, twice=chance.random() < 0.4)


def stopped_once(chance: Random, place: Path) -> Report:
    """A9 in short: one rank, one SIGTERM."""
    return _stopped(chance, place, 1, signal.SIGTERM, twice=False)


def _stopped(chance: Random, place: Path, ranks: int, number: signal.Signals, *, twice: bool) -> Report:
    report = Report()
    process = start(place, "run", ranks, steps=100_000)
    wait_for_saves(place / "run", process)
    time.sleep(chance.uniform(0, 0.5))
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if twice:
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(number)
    report.faults += 1
    told = f"{'twice' if twice else 'once'} {number.name} on {ranks} ranks"
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        report.broken.append(f"{told}: still there after a minute")
        return report
    report.expect(code == (6 if number is signal.SIGTERM else 130), f"{told}: exit code {code}: {tail(place, 'run')}")
    time.sleep(0.2)
    left = living(family)
    report.expect(not left, f"{told}: {len(left)} processes are left")
    newest = CheckpointStore(place / "run" / "checkpoints").latest()
    report.expect(newest is not None, f"{told}: no whole checkpoint")
    if not twice and newest is not None:
        entries = CheckpointStore(place / "run" / "checkpoints").all()
        report.expect(verify(entries[-1].path).ok, f"{told}: the last save is not whole")
    return report
