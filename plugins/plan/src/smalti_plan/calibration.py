"""Thirteen real steps on the devices at hand, and what they say about the formulas. Imports no torch.

Steps of one way to train do not say how fast others are: what is sent, stepped and dispatched is measured by itself, and the
steps give what is left, the products.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from smalti import UserError
from smalti.parallel import DeviceModel, Products
from smalti.plugins import CacheFile
from smalti.rundir import RunDirectory
from smalti.system import kill_tree
from smalti_plan.choices import Choice
from smalti_plan.facts import ModelFacts
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.formulas.time import FAST, SLOW, Efficiency, time_of
from smalti_plan.rates import Rates, measure_rates

CACHE = "plan-calibrations"
STEPS = 13
_WARM_UP = 3
"""Of these the first ones are left out: compilation, first allocations."""
_RANGE = 1.25
"""What remains uncertain about other strategies and batches, as a factor in both directions."""
_LEAST, _MOST = 1e-4, 100.0
"""Shares of the peak of products that are looked at. It is more than 1 if the peak was measured while the device was busy."""
_POLL_SECONDS = 0.2
_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one kind of device reaches with one type of products: FLOP/s of them, bytes per second, seconds for an operation.

    `seconds` is the median of the measured steps, `peak_memory` the measured peak in bytes, 0 if unknown. `way` says in words
    what was measured.
    """

    products: float
    memory: float
    links: Mapping[str, float]
    dispatch: float
    seconds: float
    peak_memory: int
    way: str
    time: float

    def efficiencies(self, device: DeviceModel, products: Products) -> tuple[Efficiency, Efficiency]:
        """The ends of the range of times on such a device."""
        found = _efficiency(device, self.products / device.peaks[products], self.memory, self.links, self.dispatch)
        return found.times(_RANGE), found.times(1 / _RANGE)


def calibrations() -> CacheFile:
    return CacheFile(CACHE)


def calibration_of(device: DeviceModel, products: Products, ranks: int) -> Calibration | None:
    """What was measured on such devices; None if nothing was. On CPUs it depends on the number of ranks on this node."""
    known = calibrations().get(_key(device, products, ranks))
    if isinstance(known, dict):
        with suppress(TypeError):
            return Calibration(**known)
    return None


def calibrate(arguments: Sequence[str], choice: Choice, model: ModelFacts, run: RunFacts, device: DeviceModel) -> Calibration:
    """Train as the arguments of `smalti train` say for some steps, in a temporary folder, and keep what was measured.

    `choice` is the same way to train, by formulas. The run is killed before it saves. Raises UserError with the end of its
    output if it fails before.
    """
    with tempfile.TemporaryDirectory(prefix="smalti-plan-") as folder:
        seconds, peak = _measured(arguments, Path(folder))
    rates = measure_rates(choice.world.local_size, device.kind)
    found = fitted(choice, model, run, device, rates, seconds, peak)
    calibrations().put(_key(device, run.products, choice.world.local_size), asdict(found))
    return found


def fitted(
    choice: Choice, model: ModelFacts, run: RunFacts, device: DeviceModel, rates: Rates, seconds: float, peak: int = 0
) -> Calibration:
    """The calibration with which the formula of a step gives `seconds`, using the rates that were measured by themselves."""
    found = _efficiency(device, 1.0, rates.memory, rates.links, rates.dispatch)

    def seconds_with(efficiency: Efficiency) -> float:
        return time_of(model, run, choice.strategy, choice.candidate, device, choice.world, efficiency).seconds

    if seconds_with(replace(found, products=_MOST)) < seconds:
        least, most = _LEAST, _MOST
        for _ in range(50):
            middle = math.sqrt(least * most)
            least, most = (middle, most) if seconds_with(replace(found, products=middle)) > seconds else (least, middle)
        found = replace(found, products=least)
    else:  # the rates were measured while the node was busier than during the steps
        found = replace(found, products=math.sqrt(FAST.products * SLOW.products))
        found = found.times(seconds_with(found) / seconds)
    candidate = choice.candidate
    batch = f"{candidate.micro_batch}x{candidate.accumulation}"
    return Calibration(
        products=found.products * device.peaks[run.products],
        memory=found.memory * device.memory_bandwidth,
        links={name: share * device.link_bandwidth for name, share in found.collectives.items()},
        dispatch=found.dispatch,
        seconds=seconds,
        peak_memory=peak,
        way=f"{choice.strategy.title}, recompute {candidate.recompute}, batch {batch}",
        time=time.time(),
    )


def _measured(arguments: Sequence[str], folder: Path) -> tuple[float, int]:
    """Median seconds of a step, and the peak memory in bytes."""
    own = (f"--output_dir={folder / 'run'}", f"--max_train_steps={10 * STEPS}", "--log_interval=1", "--memory_forecast=off")
    directory = RunDirectory(folder / "run")
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "smalti", "train", *arguments, *own], stdout=output, stderr=output, start_new_session=True
        )
        try:
            while len(found := directory.recent_steps(STEPS)) < STEPS:
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


def _efficiency(device: DeviceModel, products: float, memory: float, links: Mapping[str, float], dispatch: float) -> Efficiency:
    return Efficiency(
        products=products,
        memory=memory / device.memory_bandwidth,
        links=math.sqrt(FAST.links * SLOW.links),
        dispatch=dispatch,
        collectives={name: rate / device.link_bandwidth for name, rate in links.items()},
    )


def _key(device: DeviceModel, products: Products, ranks: int) -> str:
    shared = [os.uname().nodename, ranks] if device.kind == "cpu" else []
    return json.dumps([device.title, products, *shared])
