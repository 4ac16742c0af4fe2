"""All checks before anything is launched or written. They report every problem at once.

Independent checks run independently, so that one problem does not hide another. A check that depends on an invalid value is
skipped. Importing this module imports no torch; checks of a model family do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smalti.config import (
    Config,
    DataOptions,
    LaunchOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    package_of,
    package_of_nodes,
    variable_of_nodes,
)
from smalti.errors import CheckpointError, ConfigError, InvalidOptionError, Problem, UserError, problems_in
from smalti.hookspecs import HookSpecs
from smalti.plugins import (
    Plugins,
    check_strategy,
    choose_distributed,
    create,
    family_entry,
    find_family,
    find_optimizer,
    is_url,
    known_families,
    open_run,
    plugin_problems,
)
from smalti.rundir import RunDirectory
from smalti.types import DistributedPlan, LaunchEntry

if TYPE_CHECKING:
    from torch import nn

    from smalti.data import DatasetSpec
    from smalti.models import ModelFamily
    from smalti.training import DenoisingLoss, PeriodicWork

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What the checks created on the way."""

    distributed: DistributedPlan
    family: ModelFamily
    loss: DenoisingLoss
    launch: LaunchEntry | None
    """The plugin that starts the ranks; None for those of one node."""
    checkpoint: Path | None
    """The checkpoint to resume from. Only the presence and the sizes of its files were checked."""
    notices: tuple[str, ...] = ()
    """About settings that have no effect."""


@dataclass(kw_only=True)
class ProblemCollector:
    """Collects the problems of independent checks."""

    problems: list[Problem] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)

    def run(self, check: Callable[[], T]) -> T | None:
        """The result of a check. None if it depends on an invalid value, or raised a UserError, which is collected."""
        try:
            return check()
        except InvalidOptionError:
            return None
        except UserError as error:
            self.errors.append(error)
            self.problems += (problem for problem in problems_in(error) if problem not in self.problems)
            return None

    def raise_if_any(self) -> None:
        """Raise what was collected: a single error as it is, several as one ConfigError."""
        if len(self.problems) == len(self.errors) == 1:
            raise self.errors[0]
        if self.problems:
            raise ConfigError(self.problems)


def check_run(config: Config, plugins: Plugins, *, thorough: bool = False) -> CheckedRun:
    """Check whether these options can train. Raises ConfigError with every problem, including those of a draft `config`.

    With `thorough`, the model is built without weights and compared with the checkpoint to resume from. That takes seconds, and
    launched ranks detect the same problems before their first step.
    """
    checks, found = _checked(config, plugins, thorough=thorough, fetch=True)
    checks.raise_if_any()
    assert found is not None, "all checks have returned a result"
    return found


def find_problems(config: Config, plugins: Plugins) -> list[Problem]:
    """All problems of these options. A model for which weights may have to be downloaded is not checked."""
    return _checked(config, plugins, thorough=False, fetch=False)[0].problems


def _checked(config: Config, plugins: Plugins, *, thorough: bool, fetch: bool) -> tuple[ProblemCollector, CheckedRun | None]:
    """The problems, and what the checks created; None if there are problems, or if weights were not to be fetched."""
    checks = ProblemCollector(problems=list(config.problems))
    checks.problems += plugin_problems(config, plugins)
    config = config.invalidated(checks.problems)
    datasets = checks.run(lambda: _datasets(config, plugins)) or ()
    checkpoint = checks.run(lambda: _checkpoint(config, plugins))
    distributed = checks.run(lambda: choose_distributed(config, plugins))
    launch = checks.run(lambda: launch_entry(config, plugins, os.environ))
    entries = plugins.gather(HookSpecs.register_optimizers)
    if checks.run(lambda: find_optimizer(config[OptimizerOptions].optimizer, entries)) and distributed:
        checks.run(lambda: check_strategy(distributed, config, plugins))
    for spec in datasets:
        checks.run(partial(_used, config, spec))
    family = checks.run(lambda: _family(config, plugins, fetch=fetch and not checks.problems, dry=thorough))
    loss: DenoisingLoss | None = None
    notices: tuple[str, ...] = ()
    if family:
        from smalti.data import encoding_cache
        from smalti.training import denoising_loss

        terms = checks.run(lambda: plugins.gather(HookSpecs.build_terms, config=config, family=family)) or []
        loss = checks.run(lambda: denoising_loss(config, family, "cpu", terms=terms))
        works = checks.run(lambda: _periodic_work(config, plugins)) or []
        for check in (*(partial(work.check, family) for work in works), *(term.check for term in terms)):
            notices = (*notices, *(checks.run(partial(check, datasets)) or ()))
        checks.run(lambda: encoding_cache(config, plugins, family))
        if distributed:
            checks.run(lambda: check_sharding(distributed, family))
        if thorough or (distributed and (distributed.context > 1 or distributed.check_model)):
            checks.run(lambda: _model(config, plugins, family, distributed, checkpoint))
    if checks.problems or not (distributed and family and loss):
        return checks, None
    made = CheckedRun(
        distributed=distributed,
        family=family,
        loss=loss,
        launch=launch,
        checkpoint=checkpoint,
        notices=(*distributed.notices, *notices),
    )
    return checks, made


def check_sharding(plan: DistributedPlan, family: ModelFamily) -> None:
    """Raises UserError for a model that cannot be sharded, if the strategy shards it."""
    if plan.shards and (reason := family.indivisible):
        raise UserError(
            f"{plan.title} cannot shard {reason}", fix="train in one process or with DDP, or remove the option that asks for it"
        )


def launch_entry(config: Config, plugins: Plugins, environment: Mapping[str, str]) -> LaunchEntry | None:
    """What a plugin says of this launch; None for one on this node alone.

    Raises ConfigError, with what to install, for a launch on several nodes without a plugin for it.
    """
    found = plugins.gather(HookSpecs.configure_launch, config=config)
    if len(found) > 1:
        names = " and ".join(entry.origin.plugin for entry in found)
        raise UserError(f"the plugins {names} both start the ranks of this launch", fix="disable one of them with --without")
    if found:
        return found[0]
    options, package = config[LaunchOptions], package_of_nodes()
    if package.plugin in plugins.infos and plugins.infos[package.plugin].state == "active":
        return None
    if options.num_machines > 1 or options.machine_rank > 0:
        name = "num_machines" if options.num_machines > 1 else "machine_rank"
        message = f"{name}={config.value(name)}: a run on several nodes needs {package.distribution}"
        raise ConfigError([package.problem(message, config.source(name))])
    given = config.source("num_machines").startswith(("flag", "environment", "Accelerate YAML"))
    if not given and (variable := variable_of_nodes(environment)):
        message = f"{variable} in the environment: a run on several nodes needs {package.distribution}"
        problem = package.problem(message, "environment")
        raise ConfigError([replace(problem, fix=f"{problem.fix}; or --num_machines=1 to train on this node alone")])
    return None


def _datasets(config: Config, plugins: Plugins) -> tuple[DatasetSpec, ...]:
    options = config[DataOptions]
    if sum(map(bool, (options.data_backend_config, options.datasets, options.instance_data_dir))) == 1:
        from smalti.data import catalog_of, dataset_specs

        return dataset_specs(config, catalog_of(plugins))
    return ()


def _checkpoint(config: Config, plugins: Plugins) -> Path | None:
    """The checkpoint to resume from, or None. Raises CheckpointError if its files are missing or have other sizes.

    None too where only node 0 sees it, and for a URL from which nothing was downloaded yet.
    """
    folder, launch, choice = config[RunOptions].output_dir, config[LaunchOptions], config[RunOptions].resume_from_checkpoint
    place = open_run(choice, plugins, config) if is_url(choice) else None
    if folder is None or (launch.machine_rank > 0 and not launch.shared_output_dir):
        return None
    from smalti.checkpoint import CheckpointStore, quick_check

    run = RunDirectory(folder)
    if place is not None:
        found = place.brought(run)
        if found is None:
            return None
        choice = str(found)
    return CheckpointStore(run.checkpoints).resolve(choice, check=quick_check)


def _family(config: Config, plugins: Plugins, *, fetch: bool, dry: bool) -> ModelFamily | None:
    """The model family; None if none is named, or if creating it could download weights and `fetch` is not set.

    With `dry`, missing weights are left to the run.
    """
    options = config[ModelOptions]
    if options.model_family is None and known_families(plugins):
        return None
    start = options.pretrained_model_name_or_path
    if family_entry(config, plugins).downloads and not fetch and not (start and Path(start).expanduser().is_dir()):
        return None
    from smalti.models import dry_run

    with dry_run("missing") if dry else nullcontext():
        return find_family(config, plugins)


def _used(config: Config, spec: DatasetSpec) -> None:
    """Raises ConfigError for a dataset of a kind that only a package which is not installed does something with."""
    kinds = (
        ("eval_steps_interval", "the dataset_type eval", "measures the loss on held-out images", spec.dataset_type == "eval"),
        ("preserve", "is_regularisation_data", "trains towards the model without the adapter", spec.is_regularisation_data),
    )
    for option, kind, what, chosen in kinds:
        if chosen and option not in config.schema.options and (package := package_of("options", option)) is not None:
            message = f"{kind} needs {package.distribution}, which {what}"
            raise ConfigError([package.problem(message, f"dataset {spec.id!r}")])


def _periodic_work(config: Config, plugins: Plugins) -> list[PeriodicWork]:
    """What the run does between steps. Raises what plugins raise that cannot do it."""
    from smalti.training import periodic_work

    return periodic_work(config, plugins)


def _model(
    config: Config, plugins: Plugins, family: ModelFamily, distributed: DistributedPlan | None, checkpoint: Path | None
) -> None:
    """Checks that need the model, without its weights."""
    from smalti.models import check_names, context_plan
    from smalti.parallel import accelerator_kind
    from smalti.training import build_model

    model, _ = build_model(config, plugins, family, accelerator_kind(config))
    check_names(model, family.weights(config[RunOptions].seed))
    if distributed and distributed.context > 1:
        context_plan(family, model, split_over=distributed.context if distributed.splits_heads else 1)
    if distributed and distributed.check_model:
        create(distributed, distributed.check_model, config, model)
    if checkpoint is not None:
        _fits(config, family, model, checkpoint)


def _fits(config: Config, family: ModelFamily, model: nn.Module, checkpoint: Path) -> None:
    """Raises CheckpointError if a checkpoint is not of this model, or not of this adapter."""
    from smalti.checkpoint import STATE, compare, read_state, stored_tensors
    from smalti.parallel import model_tensors
    from smalti.training import check_adapter

    trainer = read_state(checkpoint / STATE).trainer
    try:
        compare("model", model_tensors(model), stored_tensors(checkpoint / "model"), trainer)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} cannot be used: {error.message}", fix=error.fix) from error
    check_adapter(family.adapter(config[RunOptions].seed), trainer, checkpoint)
