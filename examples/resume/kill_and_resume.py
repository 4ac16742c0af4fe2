"""Kill a run of four processes with SIGKILL, resume it in one, and draw its loss over that of a run that was never interrupted.

    python examples/emoji/prepare.py demo/faces
    python examples/resume/kill_and_resume.py demo/resume --to docs/resume.png

Needs smalti, a package with the family `toy`, smalti-fsdp2 and matplotlib. Takes some minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import psutil
from matplotlib.figure import Figure
from PIL import Image

CONFIG = Path(__file__).with_name("config.toml")
ONE_PROCESS = ("--num_processes=1", "--no_fsdp_enable", "--gradient_accumulation_steps=4")
PALE, BEFORE, AFTER, INK = "#b9c4cc", "#2a6f97", "#c1541c", "#343a40"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses by step: of the run that was not interrupted, and of the other one before it was killed and after it resumed."""

    whole: dict[int, float]
    before: dict[int, float]
    after: dict[int, float]

    @property
    def difference(self) -> float:
        """The largest difference of a loss after resuming, relative to the loss of the same step without interruption."""
        return max(abs(loss - self.whole[step]) / self.whole[step] for step, loss in self.after.items())


def train(output: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "smalti", "train", str(CONFIG), f"--output_dir={output}", *flags]


def losses(run: Path, skip: int = 0) -> list[tuple[int, float]]:
    """Step and loss of each step in the order in which they were made, without the first `skip`."""
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [(event["step"], event["loss"]) for event in events if event["type"] == "step"][skip:]


def kill_after(step: int, run: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Wait until the run has made this step, then SIGKILL the launcher and all of its processes."""
    while len(losses(run)) < step:
        if launcher.poll() is not None:
            raise SystemExit(f"the run ended before step {step}")
        time.sleep(0.2)
    parent = psutil.Process(launcher.pid)
    for process in [*reversed(parent.children(recursive=True)), parent]:
        process.kill()
    launcher.wait()


def compare(folder: Path, kill_at: int, flags: list[str]) -> Comparison:
    """Make both runs below `folder`."""
    whole, killed = folder / "uninterrupted", folder / "killed"
    subprocess.run(train(whole, *flags), check=True)
    kill_after(kill_at, killed, subprocess.Popen(train(killed, *flags)))
    before = losses(killed)
    subprocess.run(train(killed, *flags, *ONE_PROCESS), check=True)
    return Comparison(whole=dict(losses(whole)), before=dict(before), after=dict(losses(killed, skip=len(before))))


def draw(result: Comparison, target: Path) -> None:
    """The three curves."""
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*result.whole.items(), strict=True), color=PALE, linewidth=6, label="4 processes, never interrupted")
    axes.plot(*zip(*result.before.items(), strict=True), color=BEFORE, linewidth=2.2, label="4 processes, until kill -9")
    axes.plot(*zip(*result.after.items(), strict=True), color=AFTER, linewidth=1, label="the same run, resumed in 1 process")
    for step, text, color in ((max(result.before), "kill -9", BEFORE), (min(result.after) - 1, "resumed", AFTER)):
        axes.axvline(step, color=color, linewidth=1, linestyle=":")
        axes.annotate(f" {text}", (step, 0.04), xycoords=("data", "axes fraction"), color=color, fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_xlim(0, max(result.whole))
    axes.grid(color="#eceff1", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelcolor=INK, labelsize=9)
    axes.legend(loc="upper right", fontsize=9, frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where both runs are kept; must not hold runs yet")
    parser.add_argument("--to", type=Path, required=True, help="the PNG to draw")
    parser.add_argument("--kill_at", type=int, default=160, help="the step after which the first run is killed")
    known, flags = parser.parse_known_args()
    result = compare(known.folder, known.kill_at, flags)
    draw(result, known.to)
    print(f"{known.to}: the losses after resuming differ by at most {result.difference:.1e} (relative)")


if __name__ == "__main__":
    main()
