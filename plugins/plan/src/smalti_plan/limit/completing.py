"""The configuration of a launch with what `--fit` chooses; what an earlier launch of the run has chosen is kept. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import cast

import psutil

from smalti import UserError, World
from smalti.config import Config, LaunchOptions, PluginOptions, RunOptions
from smalti.parallel import DeviceModel
from smalti.plugins import Selection, load_plugins
from smalti.rundir import RunDirectory
from smalti.system import format_bytes, load_json, parse_bytes, read_regular
from smalti_plan.choices import Choice
from smalti_plan.counted import facts_of
from smalti_plan.fit import ALLOWANCES
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.here import detected, named_device
from smalti_plan.limit.search import WEIGHTS_DTYPE, Search, host_of, seconds_of, settings, with_options
from smalti_plan.options import AUTO, PlanOptions
from smalti_plan.report import flags


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was chosen for `fit` and `fit_host` on so many ranks, with its effective batch: values by option.

    `predicted` says in words what it takes.
    """

    fit: str
    fit_host: str
    ranks: int
    batch: int
    options: Mapping[str, object]
    predicted: str

    @classmethod
    def of(cls, text: object) -> Kept | None:
        """What the option `fit_choice` holds; None for anything that this version did not write."""
        try:
            return cls(**load_json(str(text)))
        except (ValueError, TypeError):
            return None

    def line(self, config: Config) -> str:
        """One line for people. Names what has other values now."""
        other = [f"--{name}={config.value(name)}" for name, value in self.options.items() if config.value(name) != value]
        but = f", but for {' '.join(other)}, which is set" if other else ""
        changed = {name: value for name, value in self.options.items() if value != config.schema.options[name].default}
        return f"--fit={self.fit} has chosen {flags(changed) or 'the defaults'}{but}: {self.predicted}"


def completed(config: Config) -> Config:
    """The configuration with the values of the fastest way that fits. Raises UserError if none fits."""
    options, launch = config[PlanOptions], config[LaunchOptions]
    if options.fit is None:
        return config
    if launch.num_machines > 1 and AUTO in (options.fit, options.fit_host):
        raise UserError(
            "what is free may differ between nodes, which must choose the same",
            fix="--fit=24GB --fit_host=200GB, or other sizes that every node has",
        )
    earlier = _values_of_run(config)
    kept = Kept.of(earlier.get("fit_choice")) or Kept.of(options.fit_choice)
    fixed = _given(config, {} if kept is None else kept.options)
    asked = (options.fit, options.fit_host, launch.num_processes)
    if kept is None or asked != (kept.fit, kept.fit_host, kept.ranks) or options.fit_batch not in (None, kept.batch):
        kept = _chosen(config, fixed, earlier, options.fit_batch or (None if kept is None else kept.batch))
    values = {name: value for name, value in kept.options.items() if name in config.schema.options and name not in fixed}
    return with_options(config, {**values, "fit_choice": json.dumps(asdict(kept))}, f"--fit={options.fit}")


def _values_of_run(config: Config) -> Mapping[str, object]:
    """All options of the run that has made steps in the output directory; empty if there is none that can be read."""
    folder = config[RunOptions].output_dir
    if folder is None or (directory := RunDirectory(folder)).latest("step") is None:
        return {}
    try:
        return cast(Mapping[str, object], load_json(read_regular(directory.launch_file))["values"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # the launch itself says what is wrong with the directory


def _given(config: Config, chosen: Mapping[str, object]) -> frozenset[str]:
    """The options that are set, without what the configuration file of the run has from an earlier choice."""

    def is_kept(name: str) -> bool:
        return config.source(name).startswith("file") and name in chosen and config.value(name) == chosen[name]

    return frozenset(name for name in config.sources if not config.is_default(name) and not is_kept(name))


def _chosen(config: Config, fixed: frozenset[str], earlier: Mapping[str, object], batch: int | None) -> Kept:
    options, launch, chosen = config[PlanOptions], config[LaunchOptions], config[PluginOptions]
    plugins = load_plugins(Selection(only=chosen.plugins, without=chosen.without))
    local = launch.num_processes // launch.num_machines
    device, host = _limited(config, local)
    model, run = facts_of(config, plugins, device.kind), RunFacts.of(config, plugins, device.kind)
    run = replace(run, effective_batch=batch or run.effective_batch)
    stored = {WEIGHTS_DTYPE, *(name for storage in (model.frozen, *model.smaller) for name in storage.options)}
    found = Search(
        config=config,
        plugins=plugins,
        model=model,
        run=run,
        device=device,
        world=World(size=launch.num_processes, local_size=local, device=device.kind),
        host=host,
        fixed=fixed,
        kept={name: earlier[name] for name in stored if name in earlier},
    ).best()
    return Kept(
        fit=cast(str, options.fit),
        fit_host=options.fit_host,
        ranks=launch.num_processes,
        batch=found.effective_batch,
        options={name: value for name, value in settings(found, config).items() if name not in fixed},
        predicted=predicted(found, device),
    )


def _limited(config: Config, local: int) -> tuple[DeviceModel, int]:
    """The device of this node with the limit as its memory, and the limit of host memory for `local` ranks, in bytes."""
    options, available = config[PlanOptions], psutil.virtual_memory().available
    found = None if config[LaunchOptions].use_cpu else detected(local)
    if found is None:
        device, free = named_device("cpu", local), available // local
    else:  # the process that asked had a context of its own, which is gone
        device, free = found[0], min(found[0].memory, found[1] + int(ALLOWANCES[0].least))
    limit = free if options.fit == AUTO else parse_bytes(cast(str, options.fit))
    return replace(device, memory=limit), available if options.fit_host == AUTO else parse_bytes(options.fit_host)


def predicted(choice: Choice, device: DeviceModel) -> str:
    """What a choice takes, in words."""
    fit, candidate = choice.fit, choice.candidate
    tight = ", tight" if fit.level != "fits" else ""
    return (
        f"{choice.strategy.title}, recompute {candidate.recompute}, batch {candidate.micro_batch}x{candidate.accumulation}; "
        f"predicted are {fit.least / 2**30:.1f} to {format_bytes(fit.most)} of {format_bytes(device.memory)}{tight}, "
        f"{format_bytes(host_of(choice))} of host memory, {' to '.join(seconds_of(choice))} s a step"
    )
