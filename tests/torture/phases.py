"""C6: a run that is killed while it indexes its images, encodes them and trains, and started again each time."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from random import Random

import psutil
from PIL import Image

from smalti.rundir import RunDirectory
from smalti.system import kill_tree

from .runs import launch, tail, tensors
from .subject import Report

STEPS = 40
OPTIONS = (
    "--model_family=sdxl",
    "--use_cpu",
    "--resolution=64",
    "--mixed_precision=no",
    "--learning_rate=1e-3",
    "--checkpoint_step_interval=1",
    "--checkpoints_total_limit=2",
    "--without=plots",
)
SCANNING, ENCODING, TRAINING = "scanning", "encoding", "training"
_AFTER = {SCANNING: (ENCODING, "building", TRAINING), ENCODING: ("building", TRAINING), TRAINING: ()}


def images(place: Path, count: int) -> Path:
    """So many that a scan and the encoding of them take a while: three shapes, and a caption for each."""
    folder = place / "images"
    if not folder.exists():
        folder.mkdir()
        for number in range(count):
            size = ((80, 80), (96, 64), (64, 96))[number % 3]
            Image.new("RGB", size, (number * 7 % 256, number // 9 % 256, 99)).save(folder / f"{number:05}.png")
            (folder / f"{number:05}.txt").write_text(f"colour {number}")
    return folder


def start(place: Path, name: str, ranks: int, count: int) -> subprocess.Popen[bytes]:
    """A run of a tiny SDXL, which encodes images and captions before it trains."""
    import tiny

    model = place / "model"
    if not model.exists():
        tiny.sdxl(model)
    words = [f"--pretrained_model_name_or_path={model}", f"--instance_data_dir={images(place, count)}", *OPTIONS]
    words += [f"--output_dir={place / name}", f"--max_train_steps={STEPS}", f"--num_processes={ranks}"]
    return launch(place, name, [*words, f"--train_batch_size={4 // ranks}"], options=())


def phase_of(run: RunDirectory, begun: float) -> str:
    """What an attempt that began at this time is doing, as its events tell; empty before the first."""
    last = run.latest("phase", "step")
    if last is None or last.time < begun:
        return ""
    return TRAINING if last.kind == "step" else last.text("phase")


def killed_in_phases(chance: Random, place: Path, *, count: int = 600, kills: int = 20) -> Report:
    """C6: of the kills some come during the scan, more while latents and captions are encoded, the rest between steps."""
    report, ranks = Report(), chance.choice((1, 2))
    report.expect(start(place, "whole", ranks, count).wait(600) == 0, f"the undisturbed run fails: {tail(place, 'whole')}")
    aims = [SCANNING] * max(1, kills // 5) + [ENCODING] * max(1, kills * 2 // 5)
    aims += [TRAINING] * (kills - len(aims))
    run, hit = RunDirectory(place / "killed"), Counter()
    delays = {SCANNING: 0.4, ENCODING: 4.0, TRAINING: 0.5}
    for aim in aims:
        begun = time.time()
        process = start(place, "killed", ranks, count)
        where = _kill_in(process, run, begun, aim, chance.uniform(0, delays[aim]), steps=chance.randrange(1, 4))
        if where is None:
            break
        hit[where] += 1
        if where in _AFTER[aim]:
            delays[aim] /= 2  # this phase is over sooner on this machine
        report.faults += 1
    code = start(place, "killed", ranks, count).wait(600)
    report.expect(code == 0, f"the resumed run on {ranks} ranks ends with {code}: {tail(place, 'killed')}")
    report.expect(report.faults == kills, f"it was complete after {report.faults} kills")
    expected, found = tensors(place, "whole"), tensors(place, "killed")
    different = [name for name in expected if expected[name] != found.get(name)]
    report.expect(not different, f"after {dict(hit)} on {ranks} ranks these differ: {different[:5]}")
    report.expect(hit[ENCODING] > 0 and hit[TRAINING] > 0, f"the kills came in other phases: {dict(hit)}")
    return report


def _kill_in(
    process: subprocess.Popen[bytes], run: RunDirectory, begun: float, aim: str, delay: float, *, steps: int
) -> str | None:
    """SIGKILL to all processes, `delay` seconds after a phase has begun; in training, after `steps` steps.

    Returns the phase in which it came, None if the run ended before.
    """
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        where = phase_of(run, begun)
        if where == aim and (aim != TRAINING or _steps(run, begun) >= steps):
            time.sleep(delay)
            break
        if where in _AFTER[aim]:
            break  # that phase was over at once
        time.sleep(0.01)
    where = phase_of(run, begun)
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is not None:
        return None
    kill_tree(process.pid)
    process.wait()
    psutil.wait_procs(family, timeout=60)
    return where


def _steps(run: RunDirectory, begun: float) -> int:
    """How many steps an attempt has made."""
    events = [json.loads(line) for line in run.events_file.read_bytes().splitlines() if b'"step"' in line]
    return sum(event["type"] == "step" and event["t"] >= begun for event in events)


def killed_in_phases_briefly(chance: Random, place: Path) -> Report:
    """C6 in short."""
    return killed_in_phases(chance, place, count=60, kills=3)
