"""Everything that can be known to be wrong before anything is launched or written, found in one round.

What stands by itself is looked at by itself, so one mistake hides no other. A check that rests on something that is wrong
already is left out. Importing this module imports no torch; asking a model family what it can train does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smalti.config import Config, DataOptions, ModelOptions, OptimizerOptions, RunOptions, ValidationOptions
from smalti.errors import CheckpointError, ConfigError, Problem, Unsettled, UserError, problems_in
from smalti.hookspecs import HookSpecs
from smalti.plugins import (
    Plugins,
    check_shares,
    check_strategy,
    choose_distributed,
    complaints,
    create,
    family_entry,
    find_family,
    find_optimizer,
    known_families,
)
from smalti.rundir import RunDirectory
from smalti.types import DistributedPlan

if TYPE_CHECKING:
    from torch import nn

    from smalti.models import ModelFamily
    from smalti.training import DenoisingLoss

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What the checks made on their way."""

    distributed: DistributedPlan
    family: ModelFamily
    loss: DenoisingLoss
    checkpoint: Path | None
    """The one to resume from; all that was looked at is that its files are there."""


@dataclass(kw_only=True)
class ProblemCollector:
    """What is wrong, from checks that know nothing of each other."""

    problems: list[Problem] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)

    def ask(self, check: Callable[[], T]) -> T | None:
        """The check's answer. None if it needs what is not known, or has raised a UserError, which is kept."""
        try:
            return check()
        except Unsettled:
            return None
        except UserError as error:
            self.errors.append(error)
            self.problems += (problem for problem in problems_in(error) if problem not in self.problems)
            return None

    def tell(self) -> None:
        """Raise what was found, if anything was: a single error as it is, more of them as one ConfigError."""
        if len(self.problems) == len(self.errors) == 1:
            raise self.errors[0]
        if self.problems:
            raise ConfigError(self.problems)


def check_run(config: Config, plugins: Plugins, *, thorough: bool = False) -> CheckedRun:
    """Whether these options can train. Raises ConfigError with every problem, also those that the `config` of a draft has.

    With `thorough` the model is built, without weights, and compared with the checkpoint to resume from. That takes seconds,
    and ranks that are launched find the same before their first step.
    """
    findings = ProblemCollector(problems=list(config.problems))
    findings.problems += complaints(config, plugins)
    config = config.unsettled(findings.problems)
    findings.ask(lambda: _datasets(config, plugins))
    checkpoint = findings.ask(lambda: _checkpoint(config))
    distributed = findings.ask(lambda: choose_distributed(config, plugins))
    entries = plugins.gather(HookSpecs.register_optimizers)
    if findings.ask(lambda: find_optimizer(config[OptimizerOptions].optimizer, entries)) and distributed:
        findings.ask(lambda: check_strategy(distributed, config, plugins))
    family = findings.ask(lambda: _family(config, plugins, fetch=not findings.problems))
    loss = findings.ask(lambda: _loss(config, family)) if family else None
    if family:
        findings.ask(lambda: _sizes(config, family))
        if distributed:
            findings.ask(lambda: check_shares(distributed, family))
        if thorough or (distributed and (distributed.context > 1 or distributed.check_model)):
            findings.ask(lambda: _model(config, plugins, family, distributed, checkpoint))
    findings.tell()
    assert distributed and family and loss, "all that was asked has answered"  # noqa: PT018
    return CheckedRun(distributed=distributed, family=family, loss=loss, checkpoint=checkpoint)


def _datasets(config: Config, plugins: Plugins) -> None:
    options = config[DataOptions]
    if sum(map(bool, (options.data_backend_config, options.datasets, options.instance_data_dir))) == 1:
        from smalti.data import catalog_of, dataset_specs

        dataset_specs(config, catalog_of(plugins))


def _checkpoint(config: Config) -> Path | None:
    """What the run is to resume from, if it is to. Raises CheckpointError if its files are not there, or of other sizes."""
    folder = config[RunOptions].output_dir
    if folder is None:
        return None
    from smalti.checkpoint import CheckpointStore, quick_check

    return CheckpointStore(RunDirectory(folder).checkpoints).resolve(
        config[RunOptions].resume_from_checkpoint, check=quick_check
    )


def _family(config: Config, plugins: Plugins, *, fetch: bool) -> ModelFamily | None:
    """The family to train; None where none is named, or where to make it could `fetch` gigabytes and must not."""
    options = config[ModelOptions]
    if options.model_family is None and known_families(plugins):
        return None
    start = options.pretrained_model_name_or_path
    if family_entry(config, plugins).downloads and not fetch and not (start and Path(start).expanduser().is_dir()):
        return None
    return find_family(config, plugins)


def _loss(config: Config, family: ModelFamily) -> DenoisingLoss:
    """What the run will train. Raises UserError for objectives, weightings and schedules that do not go together."""
    from smalti.training import denoising_loss

    return denoising_loss(config, family, "cpu")


def _sizes(config: Config, family: ModelFamily) -> None:
    """Whether the family can sample what validation asks for."""
    if config[ValidationOptions].validation_prompt:
        from smalti.training import validation_sizes

        validation_sizes(config, family.alignment)


def _model(
    config: Config, plugins: Plugins, family: ModelFamily, distributed: DistributedPlan | None, checkpoint: Path | None
) -> None:
    """What can be seen of the model itself."""
    from smalti.models import context_plan
    from smalti.parallel import accelerator_kind
    from smalti.training import build_model

    model, _ = build_model(config, plugins, family, accelerator_kind(config))
    next(family.weights(config[RunOptions].seed).names(), None)  # looks at their files
    if distributed and distributed.context > 1:
        context_plan(family, model, dealt_to=distributed.context if distributed.splits_heads else 1)
    if distributed and distributed.check_model:
        create(distributed, distributed.check_model, config, model)
    if checkpoint is not None:
        _fits(config, family, model, checkpoint)


def _fits(config: Config, family: ModelFamily, model: nn.Module, checkpoint: Path) -> None:
    """Whether a checkpoint is one of this model, and of this adapter."""
    from smalti.checkpoint import STATE, compare, read_state, stored_tensors
    from smalti.models import Adaptable
    from smalti.parallel import model_tensors
    from smalti.training import check_adapter

    trainer = read_state(checkpoint / STATE).trainer
    try:
        compare("model", model_tensors(model), stored_tensors(checkpoint / "model"), trainer)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} cannot be used: {error.message}", fix=error.fix) from error
    adapter = family.adapter(config[RunOptions].seed) if isinstance(family, Adaptable) else None
    check_adapter(adapter, trainer, checkpoint)
