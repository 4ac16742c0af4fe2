"""How the figures of checks are measured, each in the process of its check. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from gpuday.checks import Check, Figures, Work
from gpuday.models import folder_of, words_of
from gpuday.processes import CheckError, Setting, checked, command, kill, run_ranks, start, tail
from smalti.rundir import RunDirectory

LAST_STEP = 100
"""Of runs that are killed."""


def steps(check: Check, setting: Setting, folder: Path) -> Figures:
    """Steps of the work; against the reference, the plan and the loop of diffusers' example, where the check asks for them."""
    work = check.work
    assert work is not None, check.name
    mine = _measured(work, setting, folder, "tested")
    peak = mine["peak"]
    found: dict[str, float | None] = {name: mine[name] for name in ("seconds", "mfu", "graphs", "breaks")}
    found |= {"peak_mib": peak and peak / 2**20, "peak_gib": peak and peak / 2**30}
    if check.reference is not None:
        other = _measured(check.reference, setting, folder, "reference")
        found["loss_difference"] = furthest(mine["losses"], other["losses"])
        found["gradient_difference"] = furthest(mine["gradients"], other["gradients"])
        found["seconds_ratio"] = mine["seconds"] / other["seconds"]
    if check.bare:
        found["bare_ratio"] = mine["seconds"] / _measured(work, setting, folder, "reference", bare=True)["seconds"]
    if check.plan:
        planned = _planned(work, setting, folder)
        found |= {"planned_gib": planned / 2**30, "peak_of_plan": peak and peak / planned}
    return found


def furthest(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite if a number is not finite, NaN if lengths differ or are 0."""
    if len(mine) != len(other) or not mine:
        return math.nan
    if not all(map(math.isfinite, (*mine, *other))):
        return math.inf
    return max(abs(one - two) / max(abs(two), 1e-12) if one != two else 0.0 for one, two in zip(mine, other, strict=True))


def _measured(work: Work, setting: Setting, folder: Path, role: str, *, bare: bool = False) -> dict[str, Any]:
    """What `gpuday.steps` measures of the work. A reference is measured once for all checks."""
    made_model(work, setting, folder)
    words = words_of(work, setting.models, folder / "run", rehearsed=setting.rehearsed)
    order: dict[str, object] = {"published": work.published, "rehearsed": setting.rehearsed, "bare": bare}
    same = [word for word in words if not word.startswith("--output_dir=")]
    digest = hashlib.sha256(json.dumps([same, order], sort_keys=True).encode()).hexdigest()[:16]
    kept = setting.folder / "references" / f"{digest}.json"
    result = folder / f"{role}.json"
    if role == "reference" and kept.exists():
        return _loaded(kept)
    argument = json.dumps({**order, "words": words, "result": str(result)})
    run_ranks(setting, "gpuday.steps", argument, folder / f"{role}.log", ranks=work.ranks, nodes=work.nodes, role=role)
    found = _loaded(result)
    if role == "reference":
        kept.parent.mkdir(exist_ok=True)
        result.replace(kept)
    return found


def _loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def made_model(work: Work, setting: Setting, folder: Path) -> None:
    """Make the model of the work if it is not there."""
    place = folder_of(work, setting.models, rehearsed=setting.rehearsed)
    if place is not None and not place.exists():
        setting.models.mkdir(parents=True, exist_ok=True)
        checked(setting, ("gpuday.models", place.name, str(place)), folder / "model.log", role="reference")


def _planned(work: Work, setting: Setting, folder: Path) -> float:
    """The peak of a step in bytes, as a rehearsal of `smalti plan` counts it."""
    words = words_of(work, setting.models, folder / "planned", rehearsed=setting.rehearsed)
    result = folder / "planned.json"
    argument = json.dumps({"words": words, "result": str(result), "rehearsed": setting.rehearsed})
    checked(setting, ("gpuday.planned", argument), folder / "planned.log", role="reference")
    return float(_loaded(result)["peak"])


def collectives(check: Check, setting: Setting, folder: Path) -> Figures:
    work = check.work or Work(ranks=2 if setting.rehearsed else int(str(setting.hardware["gpus"])))
    words = words_of(work, setting.models, folder / "run", rehearsed=setting.rehearsed)
    result = folder / "tested.json"
    argument = json.dumps({"words": words, "result": str(result), "rehearsed": setting.rehearsed})
    run_ranks(setting, "gpuday.collectives", argument, folder / "tested.log", ranks=work.ranks, nodes=work.nodes)
    return _loaded(result)


def health(check: Check, setting: Setting, folder: Path) -> Figures:
    """Of `smalti health`; in a rehearsal with a driver that smalti-testing compiles, unless there is one already."""
    environment = setting.environment("tested")
    gpus = int(str(setting.hardware["gpus"]))
    if setting.rehearsed:
        from smalti_testing.nvml import VARIABLE, FakeNvml

        gpus = 1
        if VARIABLE not in environment:
            environment |= FakeNvml(folder).environment
    process = subprocess.run(
        [sys.executable, "-m", "smalti", "health", "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode not in (0, 1):
        raise CheckError(f"smalti health ended with exit code {process.returncode}\n{process.stderr[-3000:]}")
    found = json.loads(process.stdout)
    read = [each for each in found if each["reading"].get("temperature") is not None]
    stopping = [each for each in found if any(one["action"].startswith("stop") for one in each["decisions"])]
    return {"unread": gpus - len(read), "stopping": len(stopping)}


# --- runs of `smalti train` -----------------------------------------------------------------------------------------


def resume(check: Check, setting: Setting, folder: Path) -> Figures:
    """A run that is killed within a step and started again, against one that is not."""
    own = ("--checkpoint_step_interval=10",)
    whole = train(setting, folder, "whole", own)
    checked(setting, whole, folder / "reference.log", role="reference")
    words, run = train(setting, folder, "killed", own), RunDirectory(folder / "killed")
    process = start(setting, words, folder / "tested.log")
    try:
        wait(lambda: _steps_after_save(run) > 1, "a checkpoint", process, folder / "tested.log")
    finally:
        kill(process)
    checked(setting, words, folder / "tested.log")
    began = [event.step for event in run.events() if event.text("state") == "running"]
    mine, other = losses(run), losses(RunDirectory(folder / "whole"))
    return {
        "loss_difference": furthest([mine[step] for step in sorted(mine)], [other[step] for step in sorted(other)]),
        "resumed_from": began[-1] if len(began) == 2 else 0,
        "last_step": max(mine),
    }


def saves(check: Check, setting: Setting, folder: Path) -> Figures:
    """A run that saves every ten steps, whose checkpoints are read back."""
    words = train(setting, folder, "run", ("--checkpoint_step_interval=10", "--checkpoints_total_limit=0"), large=True)
    checked(setting, words, folder / "tested.log")
    made = [event for event in RunDirectory(folder / "run").events() if event.kind == "checkpoint"]
    unverified = command(setting, ("smalti", "checkpoint", "verify", str(folder / "run")), folder / "verified.log")
    blocked = [event.number("blocked") or 0.0 for event in made[:-1]]  # the last one is waited for
    return {
        "checkpoints": len(made),
        "unverified": int(unverified != 0),
        "blocked_seconds": max(blocked, default=math.nan),
        "gb_per_second": max(speeds(made), default=None),
    }


def lost_rank(check: Check, setting: Setting, folder: Path) -> Figures:
    """Two ranks of DDP, of which rank 1 is killed."""
    words = train(setting, folder, "run", ("--checkpoint_step_interval=0", "--max_train_steps=100000"), work=Work(ranks=2))
    run, log = RunDirectory(folder / "run"), folder / "tested.log"
    process = start(setting, words, log)
    try:
        wait(lambda: last(run, "step") >= 5, "step 5", process, log)
        victim = _rank_below(process.pid, 1)
        begun = time.monotonic()
        victim.kill()
        process.wait(300)
        seconds = time.monotonic() - begun
    finally:
        kill(process)
    saved = [event.step or 0 for event in run.events() if event.kind == "checkpoint"]
    return {
        "ended_seconds": seconds,
        "lost_steps": max(losses(run)) - max(saved, default=0),
        "named": int("rank 1" in tail(log)),
        "exit_code": process.returncode,
    }


def train(
    setting: Setting, folder: Path, name: str, more: Iterable[str], *, work: Work | None = None, large: bool = False
) -> list[str]:
    """Words of a run of the toy model on a few images, in `folder / name`. `large`: with gigabytes of state on a device."""
    words = words_of(work or Work(), setting.models, folder / name, rehearsed=setting.rehearsed)
    size = ["--toy_width=1024", "--toy_depth=12", "--toy_heads=16"] if large and not setting.rehearsed else []
    own = [f"--instance_data_dir={_images(setting.folder)}", f"--max_train_steps={LAST_STEP}", "--without=plots"]
    precision = ["--mixed_precision=no", "--no_allow_tf32", "--sdpa_backend=math"]
    return ["smalti", "train", *words, *size, *own, *precision, *more]


def _images(folder: Path) -> Path:
    """Sixteen images of one colour, made once."""
    place = folder / "images"
    if not place.exists():
        from PIL import Image

        making = folder / "images.making"
        making.mkdir(exist_ok=True)
        for number in range(16):
            Image.new("RGB", (64, 64), (number * 15, 255 - number * 15, 99)).save(making / f"{number}.png")
            (making / f"{number}.txt").write_text(f"colour {number}")
        making.rename(place)
    return place


def losses(run: RunDirectory) -> dict[int, float]:
    """The loss of each step; of one that was made twice, the later."""
    found = {}
    for event in run.events():
        if event.kind == "step" and event.step is not None:
            loss = event.number("loss")
            found[event.step] = math.nan if loss is None else loss
    return found


def speeds(made: Iterable[Any]) -> list[float]:
    return [(event.number("size") or 0) / event.number("seconds") / 1e9 for event in made if event.number("seconds")]


def last(run: RunDirectory, kind: str) -> int:
    """The step of the last event of this kind; 0 if there is none."""
    event = run.latest(kind)
    return 0 if event is None else event.step or 0


def _steps_after_save(run: RunDirectory) -> int:
    saved = last(run, "checkpoint")
    return last(run, "step") - saved if saved else 0


def wait(done: Callable[[], bool], what: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    """Raises CheckError if the process ends before, or the time is over."""
    deadline = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise CheckError(f"{what} never came; exit code {process.returncode}\n{tail(log)}")
        time.sleep(0.01)


def _rank_below(pid: int, rank: int) -> psutil.Process:
    for each in psutil.Process(pid).children(recursive=True):
        try:
            if "smalti.launch.worker" in each.cmdline() and each.environ().get("RANK") == str(rank):
                return each
        except psutil.NoSuchProcess:
            continue
    raise CheckError(f"no process of rank {rank} below {pid}")


MEASURES: Mapping[str, Callable[[Check, Setting, Path], Figures]] = {
    each.__name__: each for each in (steps, collectives, health, resume, saves, lost_rank)
}
