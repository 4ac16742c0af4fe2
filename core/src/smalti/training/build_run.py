"""Everything that the loop needs, assembled in the one right order.

directory -> family -> data -> encode ahead -> model (meta) -> blocks -> wrap -> optimizer -> setup -> load checkpoint -> loader
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from smalti.checkpoint import CheckpointStore, Saver
from smalti.config import Config, DataOptions, ModelOptions, OptimizerOptions, RunOptions, TrainingOptions
from smalti.data import (
    Encoded,
    Loader,
    PreparedData,
    encode_ahead,
    load_data,
    scan_data,
    scan_entry,
    scan_progress,
    total_steps,
    was_scanned,
)
from smalti.errors import BrokenPlugin, UserError
from smalti.hookspecs import HookSpecs
from smalti.models import (
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
from smalti.parallel import Boundary, Communicator, Parallel, RankError, products, run_on_all_ranks, run_on_main_rank
from smalti.plugins import Plugins, create, find_family
from smalti.rundir import Ownership, RunWriter, join
from smalti.training.checkpointing import write
from smalti.training.failures.disk_space import DiskSpace
from smalti.training.loss import denoising_loss
from smalti.training.metrics import Memory, Utilisation, peak_of
from smalti.training.optim.ema import build_ema
from smalti.training.optim.lr_schedule import build_scheduler
from smalti.training.optim.optimizers import matrices, parameter_groups
from smalti.training.periodic import periodic_work
from smalti.training.resume import resume
from smalti.training.run import Assembled, Context, Run, directory_of
from smalti.types import Block, DistributedPlan, RunInfo

_log = logging.getLogger(__name__)


def open_parallel(plan: DistributedPlan, config: Config) -> Parallel:
    """This rank's end of the backend; joins the process group."""
    return cast(Parallel, create(plan, plan.parallel, config))


def become_run(config: Config, communicator: Communicator, writer: RunWriter | None, closing: ExitStack) -> RunWriter | None:
    """The run directory in the hands of the main rank, None on others. *Collective*.

    `writer` is it if this process holds it already; what is taken here is left with `closing`.
    """
    taken = [] if writer is None else [writer]

    def take() -> str:
        if communicator.world.is_main and writer is None:
            directory = directory_of(config)
            taken.append(join(directory, config_digest=config.digest, world_size=communicator.world.size))
            closing.callback(taken[0].close)
            taken[0].events.mask = config.masked
        return ""

    try:
        run_on_all_ranks(communicator, take)
    except RankError as failure:
        raise failure.for_user() from failure
    return taken[0] if taken else None


def build(context: Context, closing: ExitStack) -> Run:
    """Assemble a run on this rank. *Collective*. What has to be closed in the end is put on `closing`."""
    config, parallel = context.config, context.parallel
    context.periodic = periodic_work(config, context.plugins)
    compare_ranks(context)
    family = find_family(config, context.plugins)
    family.to(parallel.world.device)
    data, encoded = open_data(context, family)
    made = assemble(context, family, data, encoded, ownership_of(context))
    saver = Saver(write=partial(write, made), communicator=parallel, background=parallel.background_communicator())
    closing.callback(saver.close)
    resume(made)
    batches = open_loader(made)
    closing.callback(batches.close)
    return begin(made, saver, batches)


def compare_ranks(context: Context) -> None:
    """Refuse to train when ranks differ in configuration, plugins or what plugins have read. *Collective*.

    They would hang or train different runs.
    """
    read = filter(None, (work.inputs for work in context.periodic))
    mine = "; ".join((f"config {context.config.digest}", *read, *context.plugins.versions))
    everyone = context.parallel.all_gather_text(mine)
    if other := next((rank for rank, said in enumerate(everyone) if said != everyone[0]), 0):
        raise UserError(
            f"rank {other} differs from rank 0:\n    rank 0: {everyone[0]}\n    rank {other}: {everyone[other]}",
            fix="install the same packages and give the same configuration on every machine",
        )


def ownership_of(context: Context) -> Ownership:
    """The ownership of this launch, which the writer of the main rank has, on every rank. *Collective*."""
    writer = context.writer
    mine = json.dumps([writer.record.id, writer.record.started]) if writer is not None else ""
    run_id, started = json.loads(context.parallel.all_gather_text(mine)[0])
    return writer.ownership if writer is not None else Ownership(context.directory, run_id, started)


def open_data(context: Context, family: ModelFamily) -> tuple[PreparedData, Encoded]:
    """The order of samples on this rank, and what of them was encoded ahead. *Collective*.

    Reads the indexes that the launcher wrote just now into the run directory. Where nobody has, the main rank scans them, or
    with a plugin all ranks do.
    """
    config, plugins, communicator, phases = context.config, context.plugins, context.parallel, context.phases
    directory, writer = context.directory.data, context.writer
    attempt = writer.record.started if writer is not None else None
    try:
        scanned = run_on_main_rank(communicator, lambda: str(attempt is not None and was_scanned(directory, attempt)))
        if scanned != str(True):
            scan = partial(scan_data, config, plugins, family.alignment, directory, scan_progress(phases), attempt=attempt)
            entry = scan_entry(config, plugins)
            if entry is None:
                notices = json.loads(run_on_main_rank(communicator, lambda: json.dumps(scan().notices)))
            else:
                notices = create(entry, entry.scan, config, plugins, directory, communicator, scan)
            for notice in notices if communicator.world.is_main else ():
                print(f"smalti: note: {notice}", file=sys.stderr)
    except RankError as failure:
        raise failure.for_user() from failure
    data = load_data(config, plugins, family.alignment, directory)
    texts = [text for work in context.periodic for text in work.texts]
    for term in plugins.gather(HookSpecs.build_terms, config=config, family=family):
        texts += term.texts(data)
    negative = [text for work in context.periodic for text in work.negative_texts]
    encoded = encode_ahead(config, plugins, family, data, communicator, directory, phases, texts, negative)
    phases.enter("building")
    return data, encoded


def assemble(
    context: Context,
    family: ModelFamily,
    data: PreparedData,
    encoded: Encoded,
    ownership: Ownership,
    weights: Weights | None = None,
) -> Assembled:
    """Model, optimizer, EMA and loss of a run whose data are there. *Collective*.

    `weights` are the first ones of the model; by default those of the family.
    """
    config, plugins, plan, parallel = context.config, context.plugins, context.plan, context.parallel
    device, seed = parallel.world.device, config[RunOptions].seed
    bare, blocks = build_model(config, plugins, family, device)
    context.state.max_steps = total_steps(config, data)
    adapter = family.adapter(seed)
    # A sharded model calls itself by another class; and an adapter's tensors are not those of such a model.
    model_config = config_of(bare) if adapter is None else ""
    (parameters, trainable), decayed = parameter_counts(bare), matrices(bare)
    model = wrap_model(config, plugins, plan, parallel, family, bare, blocks, seed, weights)
    groups = parameter_groups(parallel.unwrap(model), config[OptimizerOptions].adam_weight_decay, decayed, family.rate_ratio)
    model, optimizer = parallel.setup(model, build_optimizer(config, plugins, model, groups))
    model.train()
    unconditional = encoded.conditioning([""], device, on_host=family.host_conditioning)
    terms = plugins.gather(HookSpecs.build_terms, config=config, family=family)
    loss = denoising_loss(config, family, device, unconditional, terms)
    info = RunInfo(
        **vars(context.info),
        family=family.name,
        parameters=parameters,
        trainable=trainable,
        effective_batch=data.order.effective_batch,
        timesteps=loss.describe_timesteps(count.bucket for count in data.counts),
        periodic=tuple(work.name for work in context.periodic),
    )
    return Assembled(
        **{**vars(context), "info": info},
        backend=plugins.backend(plan),
        ownership=ownership,
        boundary=Boundary(context.detector.claim, device),
        family=family,
        model=model,
        model_config=model_config,
        adapter=adapter,
        blocks=blocks,
        optimizer=optimizer,
        ema=build_ema(config, parallel, optimizer),
        loss=loss,
        data=data,
        encoded=encoded,
        checkpoints=CheckpointStore(context.directory.checkpoints, report=_log.warning),
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


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """How many numbers a model has, before it is spread over ranks, and how many of them train."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


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


def build_optimizer(config: Config, plugins: Plugins, model: nn.Module, groups: list[dict[str, object]]) -> Optimizer:
    """The optimizer of the wrapped model over these groups, which `parameter_groups` makes."""
    registry = plugins.gather(HookSpecs.register_optimizers)
    optimizer = plugins.decide(HookSpecs.build_optimizer, model=model, groups=groups, config=config, registry=registry)
    assert optimizer is not None, "the core's own answer comes last"
    return optimizer


def begin(made: Assembled, saver: Saver, batches: Loader) -> Run:
    """The run from where its `state` stands: the last act of building, after any checkpoint was loaded.

    The gauges begin here too, so that what building needed does not count.
    """
    config, world, state = made.config, made.world, made.state
    peak = peak_of(world, products(config, torch.device(world.device).type))
    state.resumed = state.step
    made.boundary.reach()
    return Run(
        **vars(made),
        saver=saver,
        scheduler=build_scheduler(made.optimizer, config[OptimizerOptions], state.max_steps, state.step),
        batches=batches,
        disk_space=DiskSpace(config, made.plugins, made.directory),
        utilisation=Utilisation(family=made.family, trained=made.info.trainable / made.info.parameters, peak=peak),
        memory=Memory(world.device),
        older_checkpoints=made.checkpoints.names(),
        saved_step=state.step,
    )


def open_loader(run: Assembled) -> Loader:
    """The stream of batches from where the run stands."""
    options = run.config[DataOptions]
    return Loader(
        run.data,
        world=run.world,
        micro_batch=options.train_batch_size,
        accumulation=run.config[TrainingOptions].gradient_accumulation_steps,
        errors=run.data.error_budget(run.directory.data / f"loading.rank-{run.world.rank}.quarantine.jsonl"),
        position=run.state.position,
        latents=run.encoded.latents,
        texts=run.encoded.texts,
        host_conditioning=run.family.host_conditioning,
        latent_shape=run.family.latent_shape,
        passes=run.loss,
    )
