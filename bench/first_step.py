"""From the start of the process to the end of the first training step: `smalti train` against the usual script.

Both load the same small SDXL, encode the same 32 captions and images, and train one step of eight. The model is so small that
imports and Python are nearly all of it: what a user waits for before a run says anything. Nothing is there beforehand, neither
indexes nor encoded images; the pages of all packages are in the page cache, and their bytecode is on disk, as after an
installation: editable packages have none where PYTHONDONTWRITEBYTECODE is set. Processes are started in turn.

Beside the seconds that pass stand the processor seconds of the whole process tree, which other load on the machine changes
little. They are counted to the end of the processes: of smalti's they hold a checkpoint and a plot as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from run import Result, paired, precision_of
from sizes import WARM_UP, sized

PAIRS = sized(7, short=1)
RANKS = sized((1, 2), short=(1,))
HERE = Path(__file__).parent


def measure() -> list[Result]:
    from sdxl import BATCH, EDGE, images, tiny_pipeline

    from smalti.cli.arguments import CommandLine

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data, model = images(place / "images"), tiny_pipeline(place / "model")
        arguments = [f"--instance_data_dir={data}", "--model_family=sdxl", f"--pretrained_model_name_or_path={model}"]
        arguments += [
            f"--resolution={EDGE}",
            "--resolution_type=pixel",
            "--mixed_precision=auto",
            "--max_train_steps=1",
            "--use_cpu",
        ]
        precision = precision_of(CommandLine.parse(arguments).config())
        results = []
        for ranks in RANKS:
            several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            script = [
                *several,
                str(HERE / "usual.py"),
                str(model),
                str(data),
                f"--batch={BATCH // ranks}",
                f"--precision={precision}",
            ]
            more = [f"--num_processes={ranks}", f"--train_batch_size={BATCH // ranks}"]
            ours, peer = [], []
            for number in range(PAIRS + WARM_UP):
                ours.append(smalti([*arguments, *more], place / f"run-{ranks}-{number}"))
                peer.append(usual(script, place))
            name = f"smalti against the usual script, {ranks} process{'es' if ranks > 1 else ''}"
            for title, unit in (("first step", "s"), ("processor time", "CPU s")):
                series = ([each.passed if unit == "s" else each.computed for each in side[WARM_UP:]] for side in (ours, peer))
                results.append(paired(f"{title}: {name}", *series, unit=unit, goal=1.0, precision=precision))
    return results


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one start: seconds until the first step was done, and processor seconds of all processes until they ended."""

    passed: float
    computed: float


def smalti(arguments: list[str], directory: Path) -> Cost:
    begin = time.time()
    computed = ran(["-m", "smalti", "train", *arguments, f"--output_dir={directory}"])
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return Cost(passed=next(event["t"] for event in events if event["type"] == "step") - begin, computed=computed)


def usual(arguments: list[str], place: Path) -> Cost:
    begin = time.time()
    computed = ran([*arguments, f"--out={place / 'times.txt'}"])
    return Cost(passed=float((place / "times.txt").read_text().split()[0]) - begin, computed=computed)


def ran(arguments: list[str]) -> float:
    """Processor seconds, user and system, of a process and of those that it started and waited for."""
    before = getrusage(RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
