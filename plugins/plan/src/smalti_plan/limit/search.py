"""The fastest way to train within limits of memory, among those that change nothing that is set. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from smalti import Problem, UserError, World, problems_in
from smalti.config import Config
from smalti.parallel import DeviceModel
from smalti.plugins import Plugins, check_strategy, choose_distributed, plugin_problems
from smalti.system import format_bytes
from smalti_plan.choices import Choice, choices, strategies_for
from smalti_plan.facts import ModelFacts
from smalti_plan.fit import HOST_PROCESS, allowances
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.report import flags

WEIGHTS_DTYPE = "weights_dtype"
"""The option, of another package, for the type of the weights that train."""
_ENCODING = 2700
"""Bytes that an autoencoder needs for each pixel of a micro-batch while it encodes it in fp32: rehearsals count up to 2,570."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for. `device` is one of those that a run trains on; its memory is the limit of each.

    `fixed` are the options that stay as `config` has them; `kept` are values that are not in `config` and stay too. The
    effective batch of `run` stays. `host` is the limit of host memory for all ranks of a node, in bytes. With `is_complete`
    false, packages that are not installed are no reason to refuse a way.
    """

    config: Config
    plugins: Plugins
    model: ModelFacts
    run: RunFacts
    device: DeviceModel
    world: World
    host: int
    fixed: Collection[str] = ()
    kept: Mapping[str, object] = field(default_factory=dict)
    is_complete: bool = True

    def best(self) -> Choice:
        """The fastest one that fits for sure, else the one that needs least of those that may fit.

        Weights are in less precision only where nothing else fits so. Raises UserError with the smallest way, and with what
        bars smaller ones, if nothing fits.
        """
        found = self.ways(self.fixed)
        refused: list[str] = []
        within = [each for each in found if fits(each, self.device, self.host)]
        for choice in sorted(within, key=self._rank):
            if not (problems := self.refused(choice)):
                return choice
            refused += [f"{choice.strategy.title}: {problems[0].message}"]
        raise self._nothing(found, list(dict.fromkeys(refused)))

    def ways(self, fixed: Collection[str]) -> list[Choice]:
        """All ways that leave the options `fixed` and the kept ones as they are, those that fit on the device first."""
        strategies = strategies_for(self.config, self.plugins, self.world, combined=True)
        return choices(
            self.model,
            self.run,
            strategies,
            self.device,
            self.world,
            admits=lambda choice: not any(True for _ in self._changed(choice, fixed)),
            everything=True,
        )

    def _rank(self, choice: Choice) -> tuple[bool, bool, int]:
        """For a stable sort of what is in the order of `ways`."""
        may_fit = choice.fit.level != "fits"
        return may_fit, self.is_rounded(choice), _need(choice) if may_fit else 0

    def is_rounded(self, choice: Choice) -> bool:
        """Whether a choice keeps weights in less precision than a run does by default, and so computes other numbers."""
        names = {WEIGHTS_DTYPE, *(name for storage in self.model.smaller for name in storage.options)}
        options, declared = settings(choice, self.config), self.config.schema.options
        return any(options[name] != declared[name].default for name in names & options.keys())

    def _changed(self, choice: Choice, fixed: Collection[str]) -> Iterator[str]:
        """The options of these and the kept ones to which a choice gives other values."""
        options = settings(choice, self.config)
        for name in fixed:
            if name in options and options[name] != self.config.value(name):
                yield name
        for name, value in self.kept.items():
            if options.get(name, self.config.value(name)) != value:
                yield name

    def refused(self, choice: Choice) -> list[Problem]:
        """Why a run would be refused for this choice before its launch: by the checks of plugins, or of the strategy."""
        config = with_options(self.config, settings(choice, self.config), "")
        found = [each for each in plugin_problems(config, self.plugins) if each not in self._own_problems]
        try:
            check_strategy(choose_distributed(config, self.plugins), config, self.plugins)
        except UserError as error:
            found += problems_in(error)
        return [each for each in found if self.is_complete or not each.package]

    @cached_property
    def _own_problems(self) -> list[Problem]:
        """What is wrong with the configuration whatever is chosen; the launch says it."""
        return plugin_problems(self.config, self.plugins)

    def _nothing(self, found: list[Choice], refused: list[str]) -> UserError:
        everything = self.ways(())
        smallest = min(everything, key=_need)
        own = min(found, key=_need, default=None)
        has = f"{self.device.title} with {format_bytes(self.device.memory)} and {format_bytes(self.host)} of host memory"
        message = f"no way to train fits on {has}"
        if refused:
            message += f"; refused are {'; '.join(refused)}"
        elif own is not None:
            message += f": with what is set, the smallest needs {_needs(own)} ({own.strategy.title}: {flags(own.options)})"
        ways = [f"--fit={_gigabytes(own)}"] if own is not None and own.fit.most > self.device.memory else []
        if own is not None and host_of(own) > self.host:
            ways.append(f"--fit_host={math.ceil(host_of(own) / 10**9)}GB")
        barring = [] if own is not None and _need(smallest) >= _need(own) else list(self._changed(smallest, self.fixed))
        if barring:
            names = ", ".join(sorted(barring))
            ways.append(f"leave out {names}: {smallest.strategy.title} needs {_needs(smallest)} ({flags(smallest.options)})")
        return UserError(message, fix="; or ".join([*ways, "fewer or smaller images at once, a LoRA, or more devices"]))


def settings(choice: Choice, config: Config) -> dict[str, object]:
    """The options of a choice, without a document that the configuration has already."""
    return {
        name: value
        for name, value in choice.options.items()
        if name in config.schema.options
        and not (choice.strategy.is_configured and isinstance(value, str) and value.startswith("{"))
    }


def with_options(config: Config, options: Mapping[str, object], why: str) -> Config:
    """The configuration with values that it lacks, each with the reason as its source."""
    for name, value in options.items():
        if config.value(name) != value:
            config = config.chosen(name, value, why)
    return config


def fits(choice: Choice, device: DeviceModel, host: int) -> bool:
    """Whether what was counted, and the least of what no count sees, is within the device's memory and `host` bytes.

    Images are encoded in micro-batches too, before the model is there.
    """
    counted = choice.counted
    peak = max(counted.peak.total, choice.candidate.micro_batch * counted.width * counted.height * _ENCODING)
    least = peak + sum(each.least * (peak if each.share else 1) for each in allowances(device, counted.ranks))
    return choice.fit.level != "does not fit" and least <= device.memory and host_of(choice) <= host


def host_of(choice: Choice) -> int:
    """Bytes of host memory for all ranks of a node, their processes included."""
    return choice.fit.host + int(HOST_PROCESS.most) * choice.world.local_size


def seconds_of(choice: Choice) -> tuple[str, str]:
    """The range of a step's seconds, each with two digits."""
    least, most = (f"{float(f'{each.seconds:.2g}'):g}" for each in (choice.fastest, choice.slowest))
    return least, most


def _need(choice: Choice) -> int:
    return choice.fit.most


def _needs(choice: Choice) -> str:
    return f"up to {format_bytes(choice.fit.most)}, and {format_bytes(host_of(choice))} of host memory"


def _gigabytes(choice: Choice) -> str:
    return f"{math.ceil(choice.fit.most / 10**9)}GB"
