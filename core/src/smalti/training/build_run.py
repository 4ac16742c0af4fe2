"""Everything that the loop needs, assembled in the one right order.

configure -> family -> data -> encode ahead -> model (meta) -> blocks -> wrap -> optimizer -> setup -> load checkpoint -> loader
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch
from torch import nn

from smalti.checkpoint import CheckpointStore, Saver
from smalti.config import (
    Config,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    TrainingOptions,
    ValidationPrompt,
    validation_prompts,
)
from smalti.data import Encoded, PreparedData, total_steps
from smalti.errors import BrokenPlugin, UserError
from smalti.hookspecs import HookSpecs
from smalti.models import (
    Adaptable,
    ModelFamily,
    Weights,
    choose_attention,
    choose_tf32,
    config_of,
    ensure_compiled,
    tf32_choice,
    use_channels_last,
    wants_channels_last,
    without_weights,
)
from smalti.parallel import Boundary, FailureDetector, Parallel
from smalti.plugins import Plugins, create, find_family
from smalti.rundir import Ownership, Phases, RunDirectory, RunWriter
from smalti.training.checkpointing import write
from smalti.training.loss import denoising_loss
from smalti.training.opening import open_data, run_info
from smalti.training.optim.ema import build_ema
from smalti.training.optim.lr_schedule import Cadence
from smalti.training.optim.optimizers import matrices, parameter_groups
from smalti.training.resume import resume
from smalti.training.run import Run
from smalti.types import (
    Block,
    DistributedPlan,
    RunState,
)

_log = logging.getLogger(__name__)


def open_parallel(plan: DistributedPlan, config: Config) -> Parallel:
    """This rank's end of the backend; joins the process group."""
    return cast(Parallel, create(plan, plan.parallel, config))


def compare_ranks(parallel: Parallel, config: Config, plugins: Plugins, prompts: Sequence[ValidationPrompt]) -> None:
    """Refuse to train when ranks differ in configuration, plugins or validation prompts. *Collective*.

    They would hang or train different runs.
    """
    read = sha256(repr(prompts).encode()).hexdigest()[:8]
    mine = f"config {config.digest}; validation prompts {read}; {'; '.join(plugins.versions)}"
    everyone = parallel.all_gather_text(mine)
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        other = different[0]
        raise UserError(
            f"rank {other} differs from rank 0:\n    rank 0: {everyone[0]}\n    rank {other}: {everyone[other]}",
            fix="install the same packages and give the same configuration on every machine",
        )


def ownership_of(directory: RunDirectory, parallel: Parallel, writer: RunWriter | None) -> Ownership:
    """The ownership of this launch, which the main rank's `writer` has, on every rank. *Collective*."""
    mine = json.dumps([writer.record.id, writer.record.started]) if writer is not None else ""
    run_id, started = json.loads(parallel.all_gather_text(mine)[0])
    return writer.ownership if writer is not None else Ownership(directory, run_id, started)


def build(
    config: Config,
    plugins: Plugins,
    plan: DistributedPlan,
    parallel: Parallel,
    detector: FailureDetector,
    closing: ExitStack,
    writer: RunWriter | None,
    state: RunState,
    phases: Phases,
) -> Run:
    """Assemble a run on this rank. *Collective*. What has to be closed in the end is put on `closing`."""
    prompts = validation_prompts(config)
    compare_ranks(parallel, config, plugins, prompts)
    directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
    family = find_family(config, plugins)
    family.to(parallel.world.device)
    data, encoded = open_data(config, plugins, family, parallel, directory.data, writer, prompts, phases)
    run = assemble(
        config,
        plugins,
        plan,
        parallel,
        detector,
        family,
        data,
        encoded,
        prompts=prompts,
        ownership=ownership_of(directory, parallel, writer),
        writer=writer,
        state=state,
        phases=phases,
    )
    run.saver = Saver(write=partial(write, run), communicator=parallel, background=parallel.background_communicator())
    closing.callback(run.saver.close)
    resume(run)
    run.start_from_here(closing)
    return run


def assemble(
    config: Config,
    plugins: Plugins,
    plan: DistributedPlan,
    parallel: Parallel,
    detector: FailureDetector,
    family: ModelFamily,
    data: PreparedData,
    encoded: Encoded,
    *,
    prompts: Sequence[ValidationPrompt],
    ownership: Ownership,
    writer: RunWriter | None,
    state: RunState,
    phases: Phases,
    weights: Weights | None = None,
) -> Run:
    """Model, optimizer, EMA and loss of a run whose data are there. *Collective*. It has no saver and no loader yet.

    `weights` are the first ones of the model; by default those of the family.
    """
    directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
    bare, blocks = build_model(config, plugins, family, parallel.world.device)
    state.max_steps = total_steps(config, data)
    seed = config[RunOptions].seed
    adapter = family.adapter(seed) if isinstance(family, Adaptable) else None
    # A sharded model calls itself by another class; and an adapter's tensors are not those of such a model.
    model_config = config_of(bare) if adapter is None else ""
    sizes, decayed = parameter_counts(bare), matrices(bare)
    model = wrap_model(config, plugins, plan, parallel, family, bare, blocks, seed, weights)
    model, optimizer = parallel.setup(model, build_optimizer(config, plugins, parallel, model, decayed))
    model.train()
    loss = denoising_loss(config, family, parallel.world.device, encoded.conditioning([""], parallel.world.device))
    return Run(
        config=config,
        plugins=plugins,
        backend=plugins.backend(plan),
        directory=directory,
        ownership=ownership,
        info=run_info(config, plugins, plan, parallel.world, family, data, loss, writer, phases, **sizes),
        parallel=parallel,
        detector=detector,
        boundary=Boundary(detector.claim, parallel.world.device),
        family=family,
        model=model,
        model_config=model_config,
        adapter=adapter,
        blocks=blocks,
        optimizer=optimizer,
        ema=build_ema(config, parallel),
        loss=loss,
        data=data,
        encoded=encoded,
        prompts=prompts,
        state=state,
        phases=phases,
        cadence=Cadence.of(config, data),
        checkpoints=CheckpointStore(directory.checkpoints, report=_log.warning),
    )


def build_model(config: Config, plugins: Plugins, family: ModelFamily, device: str = "cpu") -> tuple[nn.Module, list[Block]]:
    """The model without weights (parameters on the meta device, buffers real), to be trained on `device`, and its blocks."""
    with without_weights():
        model = family.build_model()
    if config[ModelOptions].gradient_checkpointing:
        enable = getattr(model, "enable_gradient_checkpointing", None)
        if enable is None:
            raise UserError(f"{family.name} cannot recompute activations", fix="--no_gradient_checkpointing")
        enable()
    if wants_channels_last(config[TrainingOptions].channels_last, family, device):
        use_channels_last(model)
    choose_attention(model, config[TrainingOptions].sdpa_backend, device)
    choose_tf32(model, tf32_choice(config, device))
    return model, plugins.decide(HookSpecs.detect_blocks, model=model, family=family, config=config) or []


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """How many numbers a model has, before it is spread over ranks, and how many of them train: as `RunInfo` calls them."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {"parameters": sum(size for size, _ in sizes), "trainable": sum(size for size, trains in sizes if trains)}


def wrap_model(
    config: Config,
    plugins: Plugins,
    plan: DistributedPlan,
    parallel: Parallel,
    family: ModelFamily,
    model: nn.Module,
    blocks: list[Block],
    seed: int,
    weights: Weights | None = None,
) -> nn.Module:
    """The model with its first weights, spread over the ranks by the chosen backend, compiled if asked for. *Collective*.

    `weights` are these; by default those of the family under this seed.
    """
    weights = weights or family.weights(seed)
    backend = plugins.backend(plan)
    parallel.barrier()  # waits for ranks that took longer so far, as the collective calls of wrapping do not
    wrapped = backend.decide(
        HookSpecs.wrap_model, model=model, family=family, blocks=blocks, parallel=parallel, weights=weights
    )
    if wrapped is None:
        message = f"{plan.origin} was chosen for the run and its hook 'wrap_model' returned no model"
        raise BrokenPlugin(message, fix=plan.origin.workaround)
    ensure_compiled(wrapped, parallel.unwrap, blocks, config, plan.title)
    return wrapped


def build_optimizer(
    config: Config, plugins: Plugins, parallel: Parallel, model: nn.Module, decayed: Collection[str]
) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train, named as the family names them; `decayed` ones get weight decay."""
    groups = parameter_groups(parallel.unwrap(model), config[OptimizerOptions].adam_weight_decay, decayed)
    registry = plugins.gather(HookSpecs.register_optimizers)
    optimizer = plugins.decide(HookSpecs.build_optimizer, model=model, groups=groups, config=config, registry=registry)
    assert optimizer is not None, "the core's own answer comes last"
    return optimizer
