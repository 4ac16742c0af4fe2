"""Ten real steps on the devices at hand, and what they say about the formulas. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from smalti.errors import UserError
from smalti.parallel import DeviceModel, Products
from smalti.planning.choices import Choice
from smalti.planning.formulas.time import StepTime
from smalti.plugins import CacheFile
from smalti.rundir import RunDirectory
from smalti.system import kill_tree

CACHE = "plan-calibrations"
STEPS = 10
_WARM_UP = 3
"""Steps that are left out: compilation, first allocations."""
_RANGE = 1.25
"""What remains uncertain about other strategies and batches, as a factor in both directions."""
_POLL_SECONDS = 0.2
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured on one kind of device with one type of products. `factor` is the measured time over that of the formulas.

    `seconds` is the median of the measured steps, `peak_memory` the measured peak in bytes, 0 if unknown. `way` says in words
    what was measured.
    """

    factor: float
    seconds: float
    peak_memory: int
    way: str
    time: float

    def apply(self, choice: Choice) -> Choice:
        """The same way with a narrower range of times."""
        middle = choice.seconds * self.factor
        fastest, slowest = (_scaled(choice.slowest, seconds) for seconds in (middle / _RANGE, middle * _RANGE))
        return replace(choice, fastest=fastest, slowest=slowest)


def calibrations() -> CacheFile:
    return CacheFile(CACHE)


def calibration_of(device: DeviceModel, products: Products) -> Calibration | None:
    """What was measured on such devices; None if nothing was."""
    known = calibrations().get(_key(device, products))
    if isinstance(known, dict):
        with suppress(TypeError):
            return Calibration(**known)
    return None


def calibrate(arguments: Sequence[str], choice: Choice, device: DeviceModel, products: Products) -> Calibration:
    """Train as the arguments of `smalti train` say for some steps, in a temporary folder, and keep what was measured.

    `choice` is the same way to train, by formulas. The run is killed before it saves. Raises UserError with the end of its
    output if it fails before.
    """
    with tempfile.TemporaryDirectory(prefix="smalti-plan-") as folder:
        seconds, peak = _measured(arguments, Path(folder))
    candidate = choice.candidate
    found = Calibration(
        factor=seconds / choice.seconds,
        seconds=seconds,
        peak_memory=peak,
        way=f"{choice.strategy.title}, recompute {candidate.recompute}, batch {candidate.micro_batch}x{candidate.accumulation}",
        time=time.time(),
    )
    calibrations().put(_key(device, products), asdict(found))
    return found


def _measured(arguments: Sequence[str], folder: Path) -> tuple[float, int]:
    """Median seconds of a step, and the peak memory in bytes."""
    steps = _WARM_UP + STEPS
    own = (f"--output_dir={folder / 'run'}", f"--max_train_steps={10 * steps}", "--log_interval=1", "--memory_forecast=off")
    directory = RunDirectory(folder / "run")
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "smalti", "train", *arguments, *own], stdout=output, stderr=output, start_new_session=True
        )
        try:
            while len(found := directory.recent_steps(steps)) < steps:
                if process.poll() is not None:
                    output.seek(0)
                    text = output.read().decode(errors="replace").strip()[-_SHOWN:]
                    raise UserError(f"the run to measure ended with {process.returncode}: {text}", fix="make it train first")
                time.sleep(_POLL_SECONDS)
        finally:
            kill_tree(process.pid)  # with its ranks: what they would save is not wanted
            process.wait()
    counted = found[_WARM_UP:]
    times = [each.number("seconds") or 0.0 for each in counted]
    peaks = [each.number("peak_memory_mb") or 0.0 for each in found]
    return median(times), int(max(peaks) * 2**20)


def _scaled(time_of: StepTime, seconds: float) -> StepTime:
    return StepTime(parts={name: part * seconds / time_of.seconds for name, part in time_of.parts.items()})


def _key(device: DeviceModel, products: Products) -> str:
    return json.dumps([device.title, products, os.uname().nodename if device.kind == "cpu" else ""])
