"""Installs built packages into empty environments, and runs the first commands of a new user there: part of `make dist`.

Everything is installed from folders, without an index: what others made is fetched once. Environments are made one after
another in two places, so that what Python compiled for one is good for the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv-dist"
CONSTRAINTS = ROOT / "constraints.txt"
PIP = ("-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check")
EXTRAS = {
    "smalti-diffusers": "quantise",
    "smalti-health": "prometheus",
    "smalti-plots": "tensorboard",
    "smalti-storage-s3": "fast",
}
OF_THE_CORE = ("version", "refusal", "config", "dry run", "verify")
"""Commands that a package beside the core does not change: half the time of an environment."""
TRAIN_MORE = {"smalti-fsdp2": ("--fsdp_enable", "--num_processes=2")}
TOY = """\
model_family = "toy"
toy_width = 8
toy_depth = 1
toy_heads = 1
toy_patch = 4
resolution = 16
resolution_type = "pixel"
instance_data_dir = "photos"
output_dir = "run"
train_batch_size = 2
max_train_steps = 2
mixed_precision = "no"
"""
LORA = """\
model_family = "pixart"
pretrained_model_name_or_path = "base"
model_type = "lora"
lora_rank = 2
resolution = 32
resolution_type = "pixel"
aspect_bucket_alignment = 32
instance_data_dir = "photos"
output_dir = "lora"
train_batch_size = 2
max_train_steps = 2
mixed_precision = "no"
"""
PHOTOS = """\
from pathlib import Path
from PIL import Image
Path("photos").mkdir()
for number in range(4):
    Image.new("RGB", (32, 32), (60 * number, 255 - 60 * number, 100)).save(f"photos/{number}.png")
    Path(f"photos/{number}.txt").write_text(f"colour {number}")
"""
PIPELINE = "import tiny, pathlib; tiny.pixart(pathlib.Path('base'))"


class TrialError(Exception):
    """A command that did not do what it must, with what it said."""


@dataclass
class Trial:
    """An environment: the packages that are asked for, and what came of it."""

    packages: tuple[str, ...]
    pip: bool = False
    """Installed by pip, which compiles all files, as users do. Otherwise by uv, which is quicker."""
    every: bool = False
    """Every command is run. Otherwise those that a package can break: what only the core answers is seen without it."""
    installed: int = 0
    """Packages."""
    megabytes: float = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each command that did what it must, in their order."""
    failure: str = ""

    def has(self, package: str) -> bool:
        """Whether the package is asked for, by name or as one of the usual set."""
        sets = ("smalti[usual]", "smalti[all]")
        return any(each.partition("[")[0] == package or (each in sets and package != "smalti-toy") for each in self.packages)


def trials(dist: Path) -> list[Trial]:
    """The core alone, each package with what it depends on, the usual set, and all."""
    names = [wheel.name.partition("-")[0].replace("_", "-") for wheel in sorted(dist.glob("smalti_*.whl"))]
    each = [f"{name}[{EXTRAS[name]}]" if name in EXTRAS else name for name in names]
    everything = ("smalti[all]", *(name for name in each if name != "smalti"))
    return [
        Trial(packages=("smalti",), pip=True, every=True),
        Trial(packages=("smalti[usual]",), every=True),
        *(Trial(packages=(name,)) for name in each),
        Trial(packages=everything, every=True),
    ]


def fetch(dist: Path, wheels: Path, packages: tuple[str, ...]) -> None:
    """The wheels of other projects that all packages need, as pip finds them; built where there is none."""
    command = [sys.executable, *PIP, "wheel", "-c", str(CONSTRAINTS), "--find-links", str(dist), "-w", str(wheels), *packages]
    subprocess.run(command, check=True)
    for own in wheels.glob("smalti*.whl"):
        own.unlink()


def run(words: list[str], place: Path, *, code: int = 0, says: str = "", **variables: str) -> str:
    """What a command printed, in the folder of an environment. Raises TrialError unless it ends with the code and says this."""
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    own = {
        "PATH": path,
        "PYTHONPYCACHEPREFIX": str(PLACE / "compiled"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(place / "bin" / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=place / "work", env={**kept, **own, **variables}, capture_output=True, text=True, timeout=600, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode != code or says not in said:
        wanted = f"wanted {code}" + (f" and {says!r}" if says else "")
        raise TrialError(f"{' '.join(words)}: exit code {done.returncode}, {wanted}\n{said[-3000:]}")
    return done.stdout


def install(trial: Trial, place: Path, dist: Path, packages: tuple[str, ...]) -> None:
    """Install into an environment, from the folders alone."""
    where = ("--no-index", "--find-links", str(PLACE / "wheels"), "--find-links", str(dist), "-c", str(CONSTRAINTS))
    if trial.pip:
        command = [str(place / "bin" / "python"), *PIP, "install", *where, *packages]
    else:
        uv = Path(sys.executable).parent / "uv"
        cache = ("--cache-dir", str(PLACE / "uv"), "--no-config")
        command = [str(uv), "pip", "install", "--quiet", *cache, "--python", str(place / "bin" / "python"), *where, *packages]
    patient = {**os.environ, "UV_LOCK_TIMEOUT": "3600"}  # one unpacks torch while the other waits, which may be long
    done = subprocess.run(command, env=patient, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TrialError(f"install {' '.join(packages)}:\n{done.stdout}{done.stderr}")


def steps(trial: Trial, place: Path, dist: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """The commands of a trial with their names, in their order."""
    return ((name, step) for name, step in _all_steps(trial, place, dist) if trial.every or name not in OF_THE_CORE)


def _all_steps(trial: Trial, place: Path, dist: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    version = next(dist.glob("smalti-*.whl")).name.split("-")[1]
    toy = "smalti-toy" not in trial.packages
    asked = {each.partition("[")[0] for each in trial.packages}
    yield "install", lambda: install(trial, place, dist, trial.packages)
    yield "version", lambda: run(["smalti", "--version"], place, says=version)
    yield "help", lambda: run(["smalti", "--help"], place, says="smalti train config.toml")
    yield "plugins", lambda: _all_active(run(["smalti", "plugins", "--json"], place), asked)
    yield "photos", lambda: run(["python", "-c", PHOTOS], place)
    if toy:
        refusal = "pip install smalti-toy"
        yield "refusal", lambda: run(["smalti", "train", "toy.toml", "--dry-run"], place, code=4, says=refusal)
        yield "toy", lambda: install(trial, place, dist, ("smalti-toy",))
    more = [word for package, words in TRAIN_MORE.items() if trial.has(package) for word in words]
    yield "config", lambda: run(["smalti", "config", "show", "toy.toml"], place, says="toy_width = 8")
    yield "dry run", lambda: run(["smalti", "train", "toy.toml", "--dry-run"], place)
    yield "train", lambda: run(["smalti", "train", "toy.toml", *more], place)
    yield "verify", lambda: run(["smalti", "checkpoint", "verify", "run"], place)
    if trial.has("smalti-diffusers"):
        tests = str(ROOT / "plugins" / "diffusers" / "tests")
        yield "pipeline", lambda: run(["python", "-c", PIPELINE], place, PYTHONPATH=tests)
        yield "lora", lambda: run(["smalti", "train", "lora.toml"], place)
        yield "export", lambda: run(["smalti", "checkpoint", "export", "lora", "--to=exported"], place)


def _all_active(printed: str, asked: set[str]) -> None:
    """Raise TrialError if a plugin of the list is not active, or a package that was asked for brought none."""
    listed = json.loads(printed)["plugins"]
    wrong = [each for each in listed if each["state"] != "active"]
    without = asked - {each["distribution"] for each in listed}
    if wrong or without:
        raise TrialError(f"smalti plugins: not active: {wrong}; without a plugin: {sorted(without)}")


def attempt(trial: Trial, place: Path, dist: Path) -> Trial:
    """Make the environment in this place and run the commands until one fails."""
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", *([] if trial.pip else ["--without-pip"]), str(place)], check=True)
    (place / "work").mkdir()
    (place / "work" / "toy.toml").write_text(TOY, encoding="utf-8")
    (place / "work" / "lora.toml").write_text(LORA, encoding="utf-8")
    try:
        for name, step in steps(trial, place, dist):
            began = time.monotonic()
            step()
            trial.seconds[name] = time.monotonic() - began
            if name == "install":
                packages = next(place.glob("lib/python*/site-packages"))
                trial.installed = sum(1 for _ in packages.glob("*.dist-info"))
                trial.megabytes = sum(each.stat().st_size for each in packages.rglob("*") if each.is_file()) / 1e6
    except (TrialError, subprocess.TimeoutExpired) as error:
        trial.failure = str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(line(trial), flush=True)
    return trial


def line(trial: Trial) -> str:
    """Of the table: what was installed, and the seconds of each command."""
    name = trial.packages[0] if len(trial.packages) == 1 else "all"
    took = "  ".join(
        f"{each} {seconds:.1f}" for each, seconds in trial.seconds.items() if each not in ("photos", "pipeline", "toy")
    )
    said = f"FAILED after: {took}\n{trial.failure}" if trial.failure else took
    return f"{name:<28}{trial.installed:>4}{trial.megabytes:>7.0f} MB  {said}"


def try_all(dist: Path) -> int:
    """Install everything in every way, print a table, and return 1 if a command failed."""
    began = time.monotonic()
    planned = trials(dist)
    fetch(dist, PLACE / "wheels", planned[-1].packages)
    print(
        f"Other projects' wheels: {time.monotonic() - began:.0f} s. Then packages, size on disk, and seconds of each command:"
    )
    places: SimpleQueue[Path] = SimpleQueue()
    for number in range(2):
        places.put(PLACE / f"environment-{number}")

    def one(trial: Trial) -> Trial:
        place = places.get()
        try:
            return attempt(trial, place, dist)
        finally:
            places.put(place)

    with ThreadPoolExecutor(2) as pool:
        failed = [trial for trial in pool.map(one, planned) if trial.failure]
    print(f"{len(planned) - len(failed)} environments of {len(planned)} in {(time.monotonic() - began) / 60:.1f} minutes.")
    return 1 if failed else 0
