"""`make quick`: what smalti was asked for, each thing seen once, in at most three minutes on two cores.

Every row starts real processes, servers and packages. It prints a table of what was asked, where it is, and what was seen,
and exits with 1 if a row fails. CONTRIBUTING.md names the tests that show the same in full.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from smalti.checkpoint import CheckpointStore, verify
from smalti.launch.launcher import kill_tree
from smalti_testing.nvml import FakeNvml
from smalti_testing.object_store import seaweed
from support.images import images_in

ROOT = Path(__file__).parents[1]
SMALTI = (sys.executable, "-m", "smalti")
TINY = (
    *("--model_family=toy", "--toy_width=32", "--toy_depth=2", "--toy_heads=2", "--resolution=16", "--resolution_type=pixel"),
    *("--mixed_precision=no", "--use_cpu", "--learning_rate=1e-3", "--without=plots"),
)
TWO = ("--num_processes=2", "--train_batch_size=2")
ONE = ("--num_processes=1", "--train_batch_size=4")
STEPS, SAVED = 120, 50
"""Of the run that is killed, and between its checkpoints. All runs have an effective batch of 4."""
ZERO_STEPS = 20
ROUNDING = 1e-4
"""Largest relative difference of two losses that are the same but for the order of additions."""
WIDTHS = (40, 51, 58)


class NotSeenError(Exception):
    """What was asked for was not seen."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotSeenError(otherwise)


@dataclass
class Place:
    """A temporary folder with images, and the uninterrupted run that other rows compare theirs with."""

    folder: Path
    images: Path
    whole: Path = field(default=Path())

    def run(self, *words: object, code: int = 0, **variables: str) -> str:
        """What a command prints. Raises NotSeenError if it ends with another exit code."""
        command = [str(word) for word in words]
        done = subprocess.run(command, env={**os.environ, **variables}, cwd=self.folder, capture_output=True, text=True)
        last = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        expect(done.returncode == code, f"exit code {done.returncode}, not {code}: {last}")
        return done.stdout

    def words(self, name: str, *flags: str) -> list[str]:
        data = (
            f"--instance_data_dir={self.images}",
            f"--output_dir={self.folder / name}",
            f"--checkpoint_step_interval={SAVED}",
        )
        return [*SMALTI, "train", *TINY, *data, *flags]

    def train(self, name: str, *flags: str, code: int = 0, **variables: str) -> Path:
        self.run(*self.words(name, *flags), code=code, **variables)
        return self.folder / name


def events(run: Path, kind: str) -> list[dict]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if line.endswith("}") and (event := json.loads(line))["type"] == kind]


def losses(run: Path, skip: int = 0) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")[skip:]}


def difference(found: dict[int, float], whole: dict[int, float]) -> float:
    """The largest relative difference of the losses of the same steps."""
    return max(abs(loss - whole[step]) / whole[step] for step, loss in found.items())


def killed_and_resumed(place: Place) -> str:
    """Two ranks under FSDP2, SIGKILL to all of their processes, and one process without FSDP to the end."""
    run = place.folder / "killed"
    with (place.folder / "killed.log").open("wb") as log:
        command = place.words("killed", *TWO, "--fsdp_enable", "--max_train_steps=100000")
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not events(run, "checkpoint"):
            expect(launcher.poll() is None, f"the run ended: {(place.folder / 'killed.log').read_text()[-300:]}")
            time.sleep(0.02)
    finally:
        kill_tree(launcher.pid)
        launcher.wait()
    made = len(events(run, "step"))
    place.train("killed", *ONE, f"--max_train_steps={STEPS}")
    after = losses(run, skip=made)
    expect(bool(after) and min(after) > 1 and max(after) == STEPS, f"steps {sorted(after)[:3]}... after the resume")
    apart = difference(after, losses(place.whole))
    expect(apart < ROUNDING, f"losses differ by {apart:.1e}")
    return f"killed after step {made}, resumed at {min(after)}: losses as without the kill, apart by at most {apart:.1e}"


def zero(place: Place) -> str:
    stage = '--deepspeed_config={"zero_optimization": {"stage": 2}}'
    run = place.train("zero", *TWO, stage, f"--max_train_steps={ZERO_STEPS}")
    apart = difference(losses(run), losses(place.whole))
    expect(apart < ROUNDING, f"losses differ by {apart:.1e}")
    place.train("zero", *ONE, f"--max_train_steps={ZERO_STEPS + 4}")
    after = losses(run, skip=ZERO_STEPS)
    expect(sorted(after) == list(range(ZERO_STEPS + 1, ZERO_STEPS + 5)), f"steps {sorted(after)} after the resume")
    later = difference(after, losses(place.whole))
    expect(later < ROUNDING, f"losses differ by {later:.1e} after the resume")
    return f"{ZERO_STEPS} steps on 2 ranks apart from FSDP2 by at most {apart:.1e}; 4 more in one process: {later:.1e}"


def object_store(place: Place) -> str:
    with seaweed(place.folder / "store") as store:
        keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key, "AWS_REGION": store.region}
        keys["AWS_ENDPOINT_URL"] = store.endpoint
        url = f"s3://{store.bucket}/runs/first"
        place.run(*SMALTI, "mirror", "push", place.whole, f"--to={url}", **keys)
        place.run(*SMALTI, "mirror", "pull", url, place.folder / "pulled", **keys)
    sent, back = (CheckpointStore(run / "checkpoints").all()[-1].path for run in (place.whole, place.folder / "pulled"))
    files = [file.relative_to(sent) for file in sent.rglob("*") if file.is_file()]
    for file in files:
        digests = [hashlib.sha256((folder / file).read_bytes()).digest() for folder in (sent, back)]
        expect(digests[0] == digests[1], f"{file} is another one")
    expect(verify(back).problems == (), f"{verify(back).problems}")
    size = sum((back / file).stat().st_size for file in files)
    return f"SeaweedFS: {len(files)} files, {size:,} bytes, the same after push and pull, and verified"


def gpu_fault(place: Place) -> str:
    """The driver is a library that says what a file says; the ranks train on the CPU. All else is real."""
    folder = place.folder / "driver"
    folder.mkdir()
    driver = FakeNvml(folder)
    driver.set("count 2")
    probe = os.pathsep.join(filter(None, (str(ROOT / "tests/e2e/probe"), os.environ.get("PYTHONPATH"))))
    variables = {"PROBE_GPUS": "count 2\necc_uncorrected_volatile.1 1\n", "PYTHONPATH": probe}
    variables |= {"PROBE_CALLS": str(place.folder / "gpu.calls"), "PROBE_SPOIL": "gpu:1:3"}
    flags = ("--max_train_steps=100000", "--gpu_health_interval=0.5")
    run = place.train("gpu", *TWO, *flags, code=5, **driver.environment, **variables)
    newest = CheckpointStore(run / "checkpoints").all()[-1]
    expect(verify(newest.path).problems == (), "the checkpoint is damaged")
    calls = [json.loads(line) for line in Path(variables["PROBE_CALLS"]).read_text().splitlines()]
    [kind] = [each["kind"] for each in calls if each["hook"] == "on_gpu_fault"]
    marks = ", ".join(newest.manifest.flags)
    return f"{kind} of GPU 1: both ranks stopped, step {newest.step} saved and marked {marks}, exit code 5"


def own_family(place: Place) -> str:
    source, site = place.folder / "my-family", place.folder / "site"
    place.run(*SMALTI, "plugin", "new", "my-family", "--kind=family", f"--to={source}")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    place.run(*pip, f"--target={site}", source)
    data = (f"--instance_data_dir={place.images}", f"--output_dir={place.folder / 'own'}", "--max_train_steps=5")
    words = ("--model_family=my_family", "--resolution=16", "--resolution_type=pixel", "--use_cpu", "--without=plots", *ONE)
    place.run(*SMALTI, "train", *words, *data, PYTHONPATH=str(site))
    found = losses(place.folder / "own")
    expect(len(found) == 5, f"{len(found)} steps")
    return f"smalti-my-family, installed from a temporary folder, made 5 steps: loss {found[1]:.3f} to {found[5]:.3f}"


def order(place: Place) -> str:
    return torture(place, "C2", "the number of ranks changed 4 times: the same samples in the same order")


def killed_saves(place: Place) -> str:
    return torture(place, "A1", "SIGKILL at 10 moments of saves: the acknowledged step was intact after each")


def torture(place: Place, group: str, held: str) -> str:
    place.run(sys.executable, "-m", "torture", "--short", f"--group={group}", PYTHONPATH=str(ROOT / "tests"))
    return held


def planner(place: Place) -> str:
    model = ("--model_family=pixart", "--model_type=full", "--output_dir=planned", "--max_train_steps=1", "--quick", "--json")
    seen = []
    for card, code in (("rtx3070", 3), ("h100-80g", 0)):
        told = json.loads(place.run(*SMALTI, "plan", *model, "--without=fsdp2,deepspeed", f"--gpu={card}", code=code))
        best = told["ranks"]["1"][0]
        seen.append(f"{best['bytes']['least'] / 2**30:.1f} GiB at least on {told['device']['title']}: {best['fit']}")
    return f"PixArt Sigma in full, one process: {'; '.join(seen)}"


def simpletuner(place: Place) -> str:
    folder = place.folder / "simpletuner"
    folder.mkdir()
    datasets = [
        {"id": "photos", "type": "local", "instance_data_dir": str(place.images), "caption_strategy": "textfile", "crop": True},
        {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": str(folder / "texts")},
    ]
    (folder / "multidatabackend.json").write_text(json.dumps(datasets))
    options = {
        "--model_family": "sdxl",
        "--model_type": "lora",
        "--lora_rank": 4,
        "--data_backend_config": str(folder / "multidatabackend.json"),
        "--output_dir": str(folder / "run"),
        "--max_train_steps": 100,
        "--num_train_epochs": 0,
        "--learning_rate": "8e-5",
        "--optimizer": "adamw_bf16",
        "--resolution": 64,
        "--resolution_type": "pixel",
        "--checkpointing_steps": 50,
    }
    (folder / "config.json").write_text(json.dumps(options))
    checked = json.loads(place.run(*SMALTI, "config", "check", folder / "config.json", "--json"))
    expect(checked["problems"] == [], f"{checked['problems']}")
    return f"config.json and multidatabackend.json as they are: {len(options)} options, 2 datasets, no problem"


ROWS: tuple[tuple[str, str, Callable[[Place], str] | str], ...] = (
    (
        "Two ranks under FSDP2 are killed, and one process resumes them unsharded",
        "plugins/fsdp2/src/smalti_fsdp2/sharded.py",
        killed_and_resumed,
    ),
    (
        "ZeRO 2 trains what one process trains, and another strategy resumes it",
        "plugins/deepspeed/src/smalti_deepspeed/engine.py",
        zero,
    ),
    ("A checkpoint makes the round trip to a real S3 server", "plugins/storage_s3/src/smalti_storage_s3", object_store),
    (
        "A GPU fault is answered: all ranks save and stop, with an exit code of its own",
        "plugins/health/src/smalti_health",
        gpu_fault,
    ),
    (
        "A model family comes from a package outside the repository",
        "plugins/testing/src/smalti_testing/templates/family",
        own_family,
    ),
    ("The order of samples is exact on any number of ranks", "core/src/smalti/data/order.py", order),
    ("A planner says before the launch whether a run fits", "plugins/plan/src/smalti_plan", planner),
    ("Several adapters train in one run", "", "not built: one adapter per run, beside it a frozen one"),
    ("Checkpoints survive kill -9 at any moment", "core/src/smalti/checkpoint", killed_saves),
    (
        "A configuration of SimpleTuner is read as it is",
        "plugins/migrate/src/smalti_migrate/simpletuner",
        simpletuner,
    ),
)
"""What was asked, where it is, and how to see it; a text instead says why there is nothing to see."""


@dataclass(frozen=True)
class Seen:
    state: str
    text: str
    seconds: float = 0.0


def see(check: Callable[[Place], str] | str, place: Place) -> Seen:
    if isinstance(check, str):
        return Seen("--", check)
    begin = time.monotonic()
    try:
        text = check(place)
    except Exception as error:  # noqa: BLE001 - a row that fails in any way is shown, and the others are still seen
        return Seen("FAILED", f"{type(error).__name__}: {error}", time.monotonic() - begin)
    return Seen("ok", text, time.monotonic() - begin)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows whose cells are wrapped, each under the title of its column."""
    lines = []
    for cells in rows:
        wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, (*WIDTHS, 12), strict=True)]
        for number in range(max(map(len, wrapped))):
            parts = (cell[number] if number < len(cell) else "" for cell in wrapped)
            lines.append("  ".join(f"{part:<{width}}" for part, width in zip(parts, (*WIDTHS, 12), strict=True)).rstrip())
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    begin = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="smalti-quick-") as name:
        folder = Path(name)
        place = Place(folder, images_in(folder / "images", 24))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        place.whole = place.train("whole", *TWO, "--fsdp_enable", f"--max_train_steps={STEPS}")
        with ThreadPoolExecutor(2) as pool:
            seen = list(pool.map(lambda row: see(row[2], place), ROWS))
    rows = [
        (asked, where, each.text, f"{each.state} {each.seconds:.0f} s" if each.seconds else each.state)
        for (asked, where, _), each in zip(ROWS, seen, strict=True)
    ]
    print(table([("asked", "where", "seen", ""), *rows]))
    failed = sum(each.state == "FAILED" for each in seen)
    print(f"{failed} of {len(ROWS)} rows failed" if failed else "every row was seen", f"in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
