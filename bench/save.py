"""Checkpoints of 300 MB: how long training waits, how fast they are written and checked, how soon a run resumes.

- blocked: what an asynchronous save takes from the loop (its start, and the wait before the next optimizer step) over what
  a synchronous one takes, with a forward and backward pass between that is as long as those of models this size.
- beside: a step while a save is always in flight, being copied, hashed and written, over one without.
- throughput: our save, with digests and fsync, over torch's distributed checkpoint, which syncs too and has no digests.
- verify: reading and checking every byte over only reading it from the page cache; BLAKE3 does about 4 GB/s a core.
- resume: from the start of the process to the first step, of a run that resumes over one that begins.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from run import Result, paired, precision_of
from sizes import WARM_UP, sized
from step import DEMO, FACES, ROOT, make_images
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from smalti.checkpoint.async_saver import Saver
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.cli.arguments import CommandLine
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import capture
from smalti.types import World

WIDTH, LAYERS, BATCH = sized((1024, 24, 96), short=(64, 2, 4))
PAIRS, STEPS, RUNS = sized((5, 10, 3), short=(1, 2, 1))


ALONE = GlooCommunicator(world=World(), group=None)


def measure() -> list[Result]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    forward_backward(model)
    optimizer.step()
    DEMO.mkdir(exist_ok=True)  # ignored by git, and on a real disk, which a temporary directory need not be
    with tempfile.TemporaryDirectory(dir=DEMO) as folder:
        place = Path(folder)
        return [
            blocked(model, optimizer, place / "blocked"),
            beside(model, optimizer, place / "beside"),
            throughput(model, optimizer, place),
            verifying(model, optimizer, place / "verify"),
            resuming(place / "resume"),
        ]


def forward_backward(model: nn.Module) -> None:
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()


def blocked(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> Result:
    saver = Saver(write=partial(save, place), communicator=ALONE, background=ALONE)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (PAIRS + WARM_UP)):
        beside = number % 2 == 0
        begin = time.perf_counter()
        saver.begin(Snapshot(step=number, state=capture(model, optimizer)), blocking=not beside)
        start = time.perf_counter() - begin
        forward_backward(model)
        begin = time.perf_counter()
        saver.wait_for_staging()
        times[beside].append(start + time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        saver.poll(finish=True)
        shutil.rmtree(place / f"step-{number:08d}")
    saver.close()
    return paired(
        "save: blocked, asynchronous over synchronous",
        times[True][WARM_UP:],
        times[False][WARM_UP:],
        unit="s",
        goal=0.10,
        precision="fp32",
    )


def beside(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> Result:
    saver = Saver(write=partial(save, place), communicator=ALONE, background=ALONE)

    def step() -> None:
        forward_backward(model)
        saver.wait_for_staging()
        optimizer.step()
        optimizer.zero_grad()

    def begin() -> None:
        saver.begin(Snapshot(step=next(numbers), state=capture(model, optimizer)))

    def step_beside() -> None:
        step()
        if saver.poll() is not None:
            begin()

    def repeat(action: Callable[[], None]) -> None:
        for _ in range(STEPS):
            action()

    numbers = itertools.count()
    slowed: list[float] = []
    free: list[float] = []
    for _ in range(PAIRS + WARM_UP):
        begin()
        slowed.append(seconds(lambda: repeat(step_beside)) / STEPS)
        saver.poll(finish=True)
        shutil.rmtree(place)
        free.append(seconds(lambda: repeat(step)) / STEPS)
    saver.close()
    return paired(
        "save: a step beside saves over one without",
        slowed[WARM_UP:],
        free[WARM_UP:],
        unit="s/step",
        goal=2.0,
        precision="fp32",
    )


def throughput(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> Result:
    state = capture(model, optimizer)
    tensors = Snapshot(step=0, state=state).tensors()
    ours, peer = [], []
    for number in range(PAIRS + WARM_UP):
        ours.append(seconds(partial(save, place / "ours", Snapshot(step=number, state=state), ALONE)))
        with warnings.catch_warnings(action="ignore"):  # that one process is meant
            peer.append(seconds(lambda: save_dcp(tensors, checkpoint_id=place / "dcp", no_dist=True)))
        shutil.rmtree(place / "ours")
        shutil.rmtree(place / "dcp")
    return paired("save: ours with digests over torch's DCP", ours[WARM_UP:], peer[WARM_UP:], unit="s", goal=1.25)


def verifying(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> Result:
    path = save(place, Snapshot(step=1, state=capture(model, optimizer)), ALONE).path
    ours, peer = [], []
    for _ in range(PAIRS + WARM_UP):
        ours.append(seconds(lambda: verify(path)))
        peer.append(seconds(lambda: read(path)))
    return paired("save: verify over reading", ours[WARM_UP:], peer[WARM_UP:], unit="s", goal=8.0)


def read(folder: Path) -> None:
    buffer = bytearray(2**20)
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resuming(place: Path) -> Result:
    make_images()
    ours, peer = [], []
    for number in range(RUNS + WARM_UP):
        run = place / str(number)
        peer.append(first_step(run, 1))
        ours.append(first_step(run, 2))
    precision = precision_of(CommandLine.parse(arguments(place, 1)).config())
    name = "save: start to first step, resumed over fresh"
    return paired(name, ours[WARM_UP:], peer[WARM_UP:], unit="s", goal=1.3, precision=precision)


def first_step(directory: Path, steps: int) -> float:
    """Seconds from the start of a process that trains up to step `steps`, its first one, to the end of that step."""
    begin = time.time()
    command = [sys.executable, "-m", "smalti", "train", *arguments(directory, steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a run ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return float(next(event["t"] for event in events if event["type"] == "step" and event["step"] == steps)) - begin


def arguments(directory: Path, steps: int) -> list[str]:
    words = [
        f"{ROOT}/examples/emoji/config.toml",
        f"--output_dir={directory}",
        "--num_processes=1",
        "--validation_prompt=[]",
    ]
    words += [f"--instance_data_dir={FACES}", f"--max_train_steps={steps}", "--without=plots"]
    words += sized([], short=["--train_batch_size=2"])
    # The schedule of the demo is longer than these runs.
    return [*words, "--lr_scheduler=constant", "--lr_warmup_steps=0"]


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
