"""From the start of the process to the end of the first training step: `smalti train` against the usual script.

Both load the same small SDXL, encode the same 32 captions and pictures, and train one step of eight. The model is so small that
imports and Python are nearly all of it: what a user waits for before a run says anything. Nothing is there beforehand, neither
indexes nor encoded pictures; the pages of all packages are in the page cache. Processes are started in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import Result, paired

PAIRS = 7
HERE = Path(__file__).parent


def measure() -> list[Result]:
    from sdxl import BATCH, EDGE, pictures, tiny_pipeline

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data, model = pictures(place / "pictures"), tiny_pipeline(place / "model")
        words = [f"--instance_data_dir={data}", "--model_family=sdxl", f"--pretrained_model_name_or_path={model}"]
        words += [
            f"--resolution={EDGE}",
            "--resolution_type=pixel",
            "--mixed_precision=bf16",
            "--max_train_steps=1",
            "--use_cpu",
        ]
        results = []
        for ranks in (1, 2):
            several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            script = [*several, str(HERE / "usual.py"), str(model), str(data), f"--batch={BATCH // ranks}"]
            more = [f"--num_processes={ranks}", f"--train_batch_size={BATCH // ranks}"]
            ours, peer = [], []
            for number in range(PAIRS + 1):
                ours.append(smalti([*words, *more], place / f"run-{ranks}-{number}"))
                peer.append(usual(script, place))
            name = f"first step: smalti against the usual script, {ranks} process{'es' if ranks > 1 else ''}"
            # The first pair only warms the page cache.
            results.append(paired(name, ours[1:], peer[1:], unit="s", goal=1.0))
    return results


def smalti(words: list[str], directory: Path) -> float:
    """Seconds from the start of `smalti train` to the end of its first step."""
    begin = time.time()
    ran(["-m", "smalti", "train", *words, f"--output_dir={directory}"])
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return next(event["t"] for event in events if event["type"] == "step") - begin


def usual(words: list[str], place: Path) -> float:
    """The same of the script."""
    begin = time.time()
    ran([*words, f"--out={place / 'times.txt'}"])
    return float((place / "times.txt").read_text().split()[0]) - begin


def ran(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
