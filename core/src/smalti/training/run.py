"""Everything that the loop needs, assembled in the one right order.

configure -> family -> data -> encode ahead -> model (meta) -> blocks -> wrap -> optimizer -> bind -> load checkpoint -> loader
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from smalti.checkpoint import CheckpointStore, SaveError, Saver, Snapshot, find_on_all_ranks
from smalti.config import (
    CheckpointOptions,
    Config,
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    TrackingOptions,
    TrainingOptions,
    ValidationOptions,
)
from smalti.data import Batch, Encoded, HeldOut, Loader, PreparedData, keep, total_steps
from smalti.errors import BrokenPlugin, CheckpointError, UserError
from smalti.hookspecs import HookSpecs
from smalti.models import (
    Adaptable,
    ModelFamily,
    choose_attention,
    choose_tf32,
    config_of,
    ensure_compiled,
    tf32_choice,
    use_channels_last,
    wants_channels_last,
    without_weights,
)
from smalti.parallel import Boundary, Communicator, FailureDetector, Parallel, RankError, products
from smalti.plugins import Backend, Plugins, create, find_family
from smalti.rundir import Phases, RunDirectory, RunWriter, SmoothedMetrics
from smalti.system import derive_seed
from smalti.training.loss import DenoisingLoss, denoising_loss
from smalti.training.metrics import log_metrics, metrics_of
from smalti.training.opening import open_data, run_info
from smalti.training.optim.ema import Ema, build_ema
from smalti.training.optim.lr_schedule import Cadence, build_scheduler
from smalti.training.optim.optimizers import check_step_sizes, matrices, parameter_groups
from smalti.training.resume_checks import Resumption, check_resumable, noise_level_notices
from smalti.training.utilization import Memory, Utilisation, peak_of
from smalti.types import (
    Block,
    Checkpoint,
    DistributedPlan,
    RunInfo,
    RunState,
    StepResult,
    StopReason,
    World,
)

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """One rank's view of the run. The loop reads it; only `advance` and the checkpoint code change it."""

    config: Config
    plugins: Plugins
    backend: Backend
    """The hooks with all backends but the chosen one left out; for the backend roles."""
    directory: RunDirectory
    info: RunInfo
    parallel: Parallel
    detector: FailureDetector
    family: ModelFamily
    model: nn.Module
    model_config: str
    """The model's own description for other tools, as JSON text; "" if it has none."""
    adapter: dict[str, object] | None
    """What the adapter is, if the run trains one."""
    blocks: list[Block]
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    loss: DenoisingLoss
    data: PreparedData
    encoded: Encoded
    state: RunState
    cadence: Cadence
    checkpoints: CheckpointStore
    saver: Saver = field(init=False)
    save_failure: SaveError | None = None
    """Why the latest checkpoint could not be written; None if it was."""
    boundary: Boundary
    parted: bool = False
    """Whether this rank may be out of step with the others, so that it must not wait for them; only at the very end."""
    scheduler: LambdaLR = field(init=False)
    batches: Loader = field(init=False)
    recent: SmoothedMetrics = field(init=False)
    utilisation: Utilisation = field(init=False)
    memory: Memory = field(init=False)
    data_changes: list[object] = field(default_factory=list)
    """At which steps the run was continued on changed data, and what had changed; for people, and JSON-able."""
    held_out: HeldOut | None = field(init=False)
    """The held-out images for evaluation, if there are any."""

    def start_from_here(self, closing: ExitStack) -> None:
        """Set learning rate and loader to where `state` stands: the last act of building, after any checkpoint was loaded.

        The gauges begin here too, so that what building needed does not count.
        """
        self.scheduler = build_scheduler(self.optimizer, self.config[OptimizerOptions], self.state.max_steps, self.state.step)
        options = self.config[DataOptions]
        self.batches = Loader(
            self.data,
            world=self.world,
            micro_batch=options.train_batch_size,
            accumulation=self.config[TrainingOptions].gradient_accumulation_steps,
            errors=self.data.error_budget(self.directory.data / f"loading.rank-{self.world.rank}.quarantine.jsonl"),
            position=self.state.position,
            prefetch=options.dataloader_prefetch,
            cache_bytes=options.dataset_cache_mb * 2**20,
            latents=self.encoded.latents,
            texts=self.encoded.texts,
        )
        closing.callback(self.batches.close)
        self.held_out = self._held_out()
        self.recent, kind = SmoothedMetrics(), torch.device(self.world.device).type
        self.utilisation = Utilisation(
            family=self.family,
            trained=self.info.trainable / self.info.parameters,
            peak=peak_of(self.world, self.config[TrackingOptions].device_tflops, products(self.config, kind)),
        )
        self.memory = Memory(self.world.device)
        self.boundary.reach()

    def _held_out(self) -> HeldOut | None:
        if self.data.held_out is None:
            return None
        return HeldOut(
            self.data.held_out,
            batch=self.config[ValidationOptions].validation_batch_size,
            device=self.world.device,
            latents=self.encoded.held_out,
            texts=self.encoded.texts,
        )

    @property
    def phases(self) -> Phases:
        """What this rank is doing; reported on the main rank."""
        return self.info.writer.phases if self.info.writer is not None else Phases()

    @property
    def world(self) -> World:
        return self.parallel.world

    @property
    def effective_batch(self) -> int:
        return self.data.order.effective_batch

    @property
    def max_grad_norm(self) -> float:
        return self.config[TrainingOptions].max_grad_norm

    def advance(self, batch: Batch, result: StepResult) -> None:
        """Count a step that is done; a skipped step moves the data position alone."""
        state, options = self.state, self.config[RunOptions]
        if result.skipped:
            self.leave_out(batch)
        else:
            state.step, state.position, state.epoch, state.skipped = result.step, batch.position + 1, batch.epoch, 0
        state.samples += result.samples
        if result.skipped and options.nonfinite_loss == "stop":
            state.request_stop(StopReason.NON_FINITE, f"the loss or its gradient is not finite in step {result.step + 1}")
        elif state.skipped >= options.max_skipped_steps:
            message = f"{state.skipped} steps in a row had a loss or gradient that is not finite"
            state.request_stop(StopReason.NON_FINITE, message)
        if broken := self.batches.budget_exhausted:
            state.request_stop(StopReason.ERROR_BUDGET, broken)
        self.boundary.reach()

    def leave_out(self, batch: Batch) -> None:
        """Pass over a batch from which nothing was learned."""
        self.state.position = batch.position + 1
        self.state.epoch = batch.epoch
        self.state.skipped += 1

    def measure(self, batch: Batch, result: StepResult) -> StepResult:
        """The step with what people are shown, on the main rank; with what it says of the devices at steps that are logged."""
        if not self.world.is_main:
            return result
        loss, rate = self.recent.update(result.loss, result.samples)
        result = replace(result, smoothed_loss=loss, recent_samples_per_second=rate)
        if result.step % self.config[TrackingOptions].log_interval:
            return result
        mfu = self.utilisation.of(result, batch.bucket.width, batch.bucket.height)
        return replace(result, mfu=mfu, peak_memory_mb=self.memory.peak_mb())

    def report(self, result: StepResult) -> None:
        """Hand the numbers of a step to the trackers."""
        if result.step % self.config[TrackingOptions].log_interval == 0:
            log_metrics(self.plugins, self.world, metrics_of(result), result.step)

    def snapshot(self) -> Snapshot:
        """The state as a checkpoint holds it; the tensors are the live ones. *Collective*."""
        state = self.state
        return Snapshot(
            step=state.step,
            state=self.parallel.state.portable(),
            ema=self.parallel.state.portable_weights(self.ema.shadows) if self.ema is not None else None,
            trainer={
                "step": state.step,
                "position": state.position,
                "epoch": state.epoch,
                "samples": state.samples,
                "effective_batch": self.effective_batch,
                "seed": self.config[RunOptions].seed,
                "timesteps": self.info.timesteps,
                "data": self.data.identity.as_json(),
                **({"data_changes": self.data_changes} if self.data_changes else {}),
                **({"adapter": self.adapter} if self.adapter is not None else {}),
            },
            plugins=self.plugins.versions,
            config_digest=self.config.digest,
            model_config=self.model_config,
        )

    def empty(self) -> Snapshot:
        """The snapshot into which a checkpoint is read, to be loaded afterwards. *Collective*."""
        return Snapshot(
            step=0,
            state=self.parallel.state.empty(),
            ema=self.parallel.state.empty_weights(self.ema.shadows) if self.ema is not None else None,
        )

    def write(self, snapshot: Snapshot, ranks: Communicator) -> Checkpoint:
        """Write a checkpoint, then let go of the oldest ones. *Collective*; in the saver's thread."""
        root = self.checkpoints.root
        checkpoint = self.backend.decide(
            HookSpecs.save_checkpoint, state=snapshot, target=root, parallel=ranks, config=self.config
        )
        assert checkpoint is not None, "the core's own answer comes last"
        if self.world.is_main:
            self.rotate()
        return checkpoint

    def rotate(self) -> None:
        """Let go of checkpoints beyond the limit. What cannot be removed stays."""
        try:
            self.checkpoints.rotate(self.config[CheckpointOptions].checkpoints_total_limit or None)
        except OSError as error:
            _log.warning("cannot look through the checkpoints for old ones: %s", error)


def reseed(run: Run, position: int) -> None:
    """Set this rank's generators for the batch at `position`: what chance the model itself takes (dropout) is then a function
    of seed, position and rank, so that no random state has to be saved and every resume is exact.
    """
    number = derive_seed(run.config[RunOptions].seed, position, run.world.rank) >> 1
    torch.manual_seed(number)
    random.seed(number)


# --- assembling -----------------------------------------------------------------------------------------------------


def open_parallel(plan: DistributedPlan, config: Config) -> Parallel:
    """This rank's end of the backend; joins the process group."""
    return cast(Parallel, create(plan, plan.parallel, config))


def compare_ranks(parallel: Parallel, config: Config, plugins: Plugins) -> None:
    """Refuse to train when ranks differ in configuration or plugins: they would hang or train different runs. *Collective*."""
    mine = f"config {config.digest}; {'; '.join(plugins.versions)}"
    everyone = parallel.all_gather_text(mine)
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        other = different[0]
        raise UserError(
            f"rank {other} differs from rank 0:\n    rank 0: {everyone[0]}\n    rank {other}: {everyone[other]}",
            fix="install the same packages and give the same configuration on every machine",
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
) -> nn.Module:
    """The model with its first weights, spread over the ranks by the chosen backend, compiled if asked for. *Collective*."""
    weights = family.weights(seed)
    backend = plugins.backend(plan)
    wrapped = backend.decide(
        HookSpecs.wrap_model, model=model, family=family, blocks=blocks, parallel=parallel, weights=weights
    )
    if wrapped is None:
        message = f"{plan.origin} was chosen for the run and its hook 'wrap_model' returned no model"
        raise BrokenPlugin(message, fix=plan.origin.workaround)
    ensure_compiled(wrapped, parallel.unwrap, blocks, config, plan.title)
    return wrapped


def resume(run: Run) -> None:
    """Continue from the checkpoint that the options name, if there is one. *Collective*.

    Hyper-parameters are the configuration's, not the checkpoint's: changing one and resuming is how it is changed.
    """
    found = chosen_checkpoint(run, run.config[RunOptions].resume_from_checkpoint)
    if found is not None:
        restore(run, found)
    identity = run.data.identity  # on every rank now, rather than in the first save
    if run.world.is_main:
        keep(identity, run.data.indexes, run.directory.data)  # for later resumes to compare with


def restore(run: Run, found: Path) -> None:
    """Fill the run from a checkpoint. *Collective*."""
    snapshot = run.empty()
    loaded = run.backend.decide(HookSpecs.load_checkpoint, source=found, state=snapshot, parallel=run.parallel)
    assert loaded is not None, "the core's own answer comes last"
    check_adapter(run.adapter, loaded.trainer, found)
    check_step_sizes(loaded.optimizer, run.optimizer)
    resumption = check_resumable(loaded.trainer, run.config, run.data, found)
    groups = run.optimizer.param_groups
    configured = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    run.parallel.state.load(snapshot.state)
    for group, values in zip(groups, configured, strict=True):
        group.update(values)
    if run.ema is not None and snapshot.ema is not None and loaded.ema:
        run.parallel.state.copy_from(snapshot.ema, run.ema.shadows)
    elif run.ema is not None:
        run.ema.restart()
    notices = [*loaded.notices, *resumption.notices, *take_place(run, cast(dict[str, int], loaded.trainer), resumption)]
    notices += noise_level_notices(loaded.trainer, run.info.timesteps)
    if run.world.is_main:
        for notice in notices:
            _log.warning("%s", notice)
        _log.warning("resuming from %s at step %d", found, run.state.step)


def take_place(run: Run, trainer: Mapping[str, int], resumption: Resumption) -> list[str]:
    """Stand where the trainer stood that wrote the checkpoint; what the user should know about that.

    Another trainer's place in the data means nothing here, so a converted checkpoint has none. Where the order of samples is a
    new one, the run begins the next epoch of that: no random number is drawn twice.
    """
    state, order = run.state, run.data.order
    state.step, notices = trainer["step"], []
    run.data_changes = [*cast(Mapping[str, list[object]], trainer).get("data_changes", [])]
    if resumption.changes:
        run.data_changes.append({"step": state.step, "changes": list(resumption.changes)})
        notices.append(f"the data have changed, and training continues with what is there now: {'; '.join(resumption.changes)}")
    if "position" in trainer:
        state.position, state.epoch, state.samples = trainer["position"], trainer["epoch"], trainer["samples"]
        if resumption.reordered:
            epoch = order.epoch_of(state.position)
            state.position = order.epoch_start(epoch + (order.epoch_start(epoch) < state.position))
        return notices
    state.position = state.step
    state.epoch = order.epoch_of(state.position)
    state.samples = state.step * run.effective_batch
    if state.step == 0:
        return notices
    return [*notices, f"the checkpoint tells no place in the data; as each step takes one batch, {state.step} are left out"]


def chosen_checkpoint(run: Run, choice: str) -> Path | None:
    """The checkpoint that rank 0 finds and all ranks verify, on every rank; its error too. *Collective*."""
    try:
        return find_on_all_ranks(run.parallel, run.checkpoints, choice)
    except RankError as failure:
        raise CheckpointError(f"cannot resume from {choice!r}: {failure}", fix=failure.fix) from failure


def check_adapter(mine: Mapping[str, object] | None, trainer: Mapping[str, object], source: Path) -> None:
    """Refuse what would make the meaning of an adapter another one without saying so."""
    if (adapter := trainer.get("adapter")) != mine:
        raise CheckpointError(
            f"{source} holds another adapter than this run trains: {adapter} there, {mine} here",
            fix="give the same --pretrained_model_name_or_path and --lora_alpha, or start a new run in a new --output_dir",
        )


def build(
    config: Config,
    plugins: Plugins,
    plan: DistributedPlan,
    parallel: Parallel,
    detector: FailureDetector,
    closing: ExitStack,
    writer: RunWriter | None = None,
) -> Run:
    """Assemble a run on this rank. *Collective*. What has to be closed in the end is put on `closing`."""
    compare_ranks(parallel, config, plugins)
    directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
    family = find_family(config, plugins)
    family.to(parallel.world.device)
    data, encoded = open_data(config, plugins, family, parallel, directory.data, writer)
    bare, blocks = build_model(config, plugins, family, parallel.world.device)
    seed = config[RunOptions].seed
    adapter = family.adapter(seed) if isinstance(family, Adaptable) else None
    # A sharded model calls itself by another class; and an adapter's tensors are not those of such a model.
    model_config = config_of(bare) if adapter is None else ""
    sizes = parameter_counts(bare)
    decayed = matrices(bare)
    model = wrap_model(config, plugins, plan, parallel, family, bare, blocks, seed)
    model, optimizer = parallel.setup(model, build_optimizer(config, plugins, parallel, model, decayed))
    model.train()
    loss = denoising_loss(config, family, parallel.world.device, encoded.conditioning([""], parallel.world.device))
    run = Run(
        config=config,
        plugins=plugins,
        backend=plugins.backend(plan),
        directory=directory,
        info=run_info(config, plugins, plan, parallel.world, family, data, loss, writer, **sizes),
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
        state=RunState(max_steps=total_steps(config, data)),
        cadence=Cadence.of(config, data),
        checkpoints=CheckpointStore(directory.checkpoints, report=_log.warning),
    )
    run.saver = Saver(write=run.write, ranks=parallel, side=parallel.background_communicator())
    closing.callback(run.saver.close)
    resume(run)
    run.start_from_here(closing)
    return run


def build_optimizer(
    config: Config, plugins: Plugins, parallel: Parallel, model: nn.Module, decayed: Collection[str]
) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train, named as the family names them; `decayed` ones get weight decay."""
    groups = parameter_groups(parallel.unwrap(model), config[OptimizerOptions].adam_weight_decay, decayed)
    registry = plugins.gather(HookSpecs.register_optimizers)
    optimizer = plugins.decide(HookSpecs.build_optimizer, model=model, groups=groups, config=config, registry=registry)
    assert optimizer is not None, "the core's own answer comes last"
    return optimizer
