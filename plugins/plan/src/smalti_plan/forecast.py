"""What the planner's formulas say about the memory of a launch: a warning before it, a comparison at its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import takewhile

from smalti import DistributedPlan, UserError, World
from smalti.config import Config, LaunchOptions, PluginOptions
from smalti.parallel import DeviceModel
from smalti.plugins import Selection, load_plugins
from smalti.rundir import RunDirectory, read_events_backwards
from smalti_plan.choices import Choice, choices, configured, strategies_for
from smalti_plan.counted import facts_of
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.here import named_device
from smalti_plan.report import flags

_GIB = 2**30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The memory of one rank as it is configured, and the best way to train on the same devices."""

    device: DeviceModel
    own: Choice
    best: Choice

    @property
    def range(self) -> str:
        fit = self.own.fit
        return f"{fit.least / _GIB:.1f} to {fit.most / _GIB:.1f} GiB"

    @property
    def notices(self) -> list[str]:
        """A warning if the run may not fit, with what would; none if it fits."""
        if self.own.fit.level == "fits":
            return []
        may = "does not fit" if self.own.fit.level == "does not fit" else "may not fit"
        has = f"{self.device.title} has {self.device.memory / _GIB:.1f} GiB"
        fix = "smalti plan shows other ways to train"
        if self.best.fit.level == "fits":
            fix = f"this would fit: {flags(self.best.options)}"
        return [f"it {may} into memory: this run needs about {self.range} on each device, and {has}; {fix}"]

    def event(self) -> dict[str, object]:
        """What the events of the run keep, in bytes."""
        fit = self.own.fit
        return {
            "least": fit.least,
            "most": fit.most,
            "counted": self.own.counted.peak.total,
            "device": self.device.title,
            "fit": fit.level,
        }

    def compared(self, directory: RunDirectory) -> tuple[float, str] | None:
        """The measured peak of the main rank in bytes, and one line that compares; None if nothing was measured."""
        of_attempt = takewhile(lambda event: event.text("state") != "starting", read_events_backwards(directory.events_file))
        peaks = [peak for event in of_attempt if (peak := event.number("peak_memory_mb")) is not None]
        if not peaks:
            return None
        measured = max(peaks) * 2**20
        return measured, f"{measured / _GIB:.1f} GiB in tensors at the peak; {self.range} were expected, with allowances"


def forecast_of(config: Config, plan: DistributedPlan, kind: str) -> Forecast | None:
    """The forecast for devices of this kind of this node; None if nothing is known about them.

    Counting a model that was not counted before takes seconds.
    """
    options = config[LaunchOptions]
    chosen = config[PluginOptions]
    plugins = load_plugins(Selection(only=chosen.plugins, without=chosen.without))
    local = options.num_processes // options.num_machines
    try:
        device = named_device("cpu" if kind == "cpu" else "detected", local)
        run = RunFacts.of(config, plugins, kind)
        world = World(size=options.num_processes, local_size=local, device=kind)
        strategies = strategies_for(config, plugins, world)
        found = choices(facts_of(config, plugins, kind), run, strategies, device, world)
    except UserError as error:
        _log.warning("the memory of this run is not forecast: %s", error.message)
        return None
    own = configured(found, config, plan.origin.plugin)
    return None if own is None else Forecast(device=device, own=own, best=found[0])
