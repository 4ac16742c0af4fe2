"""One rank's view of the run: what the loop reads, counts and saves."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from smalti.checkpoint import CheckpointStore, SaveError, Saver
from smalti.config import (
    Config,
    DataOptions,
    OptimizerOptions,
    RunOptions,
    TrackingOptions,
    TrainingOptions,
    ValidationOptions,
    ValidationPrompt,
)
from smalti.data import Batch, Encoded, HeldOut, Loader, PreparedData
from smalti.models import (
    ModelFamily,
)
from smalti.parallel import Boundary, FailureDetector, Parallel, products
from smalti.plugins import Backend, Plugins
from smalti.rundir import Ownership, Phases, RunDirectory, SmoothedMetrics
from smalti.system import derive_seed
from smalti.training.failures.disk_space import DiskSpace
from smalti.training.failures.step_times import ForwardTime, StepTimes
from smalti.training.loss import DenoisingLoss
from smalti.training.metrics import log_metrics, metrics_of
from smalti.training.optim.ema import Ema
from smalti.training.optim.lr_schedule import Cadence, build_scheduler
from smalti.training.utilization import Memory, Utilisation, peak_of
from smalti.types import (
    Block,
    RunInfo,
    RunState,
    StepResult,
    StopReason,
    World,
)

_log = logging.getLogger(__name__)
MOST_SKIPPED_STEPS = 10
"""Steps in a row that are skipped for a loss that is not finite or a fault of the accelerator, before the run stops."""


@dataclass(kw_only=True)
class Run:
    """One rank's view of the run. The loop reads it; only `advance` and the checkpoint code change it."""

    config: Config
    plugins: Plugins
    backend: Backend
    """The hooks with all backends but the chosen one left out; for the backend roles."""
    directory: RunDirectory
    ownership: Ownership
    """Whether this launch still owns the run directory."""
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
    prompts: Sequence[ValidationPrompt]
    """The prompts of validation images."""
    base_images: Collection[str] = frozenset()
    """The names of the images that the model before training made of them, if they are there."""
    state: RunState
    phases: Phases = field(default_factory=Phases)
    """What this rank is doing; reported on the main rank."""
    disk_space: DiskSpace = field(init=False)
    step_times: StepTimes = field(default_factory=StepTimes)
    forward_time: ForwardTime = field(init=False)
    cadence: Cadence
    checkpoints: CheckpointStore
    saver: Saver = field(init=False)
    older_checkpoints: frozenset[str] = frozenset()
    """The names in the folder of checkpoints when the loop began: what other launches saved."""
    saved_step: int | None = None
    """The step of the newest checkpoint that all ranks know to be saved."""
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
            latents=self.encoded.latents,
            texts=self.encoded.texts,
        )
        closing.callback(self.batches.close)
        self.held_out = self._held_out()
        self.disk_space = DiskSpace(self.config, self.plugins, self.directory)
        self.recent, kind = SmoothedMetrics(), torch.device(self.world.device).type
        self.utilisation = Utilisation(
            family=self.family,
            trained=self.info.trainable / self.info.parameters,
            peak=peak_of(self.world, products(self.config, kind)),
        )
        self.memory = Memory(self.world.device)
        self.forward_time = ForwardTime(self.world.device)
        self.state.resumed = self.saved_step = self.state.step
        self.older_checkpoints = self.checkpoints.names()
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
    def world(self) -> World:
        return self.parallel.world

    @property
    def effective_batch(self) -> int:
        return self.data.order.effective_batch

    def clip_gradients(self) -> Tensor:
        """Clip as the options say; returns the global norm before. *Collective*."""
        options, parallel = self.config[TrainingOptions], self.parallel
        clip = parallel.clip_gradient_values if options.grad_clip_method == "value" else parallel.clip_gradients
        return clip(options.max_grad_norm)

    def advance(self, batch: Batch, result: StepResult) -> None:
        """Count a step that is done; a skipped step moves the data position alone."""
        self.phases.note_progress()
        self.step_times.add(result.seconds)
        if self.phases.current is not None and self.phases.current.name == "compiling":
            self.phases.enter("training")
        state, options = self.state, self.config[RunOptions]
        if result.skipped:
            self.leave_out(batch)
        else:
            state.step, state.position, state.epoch, state.skipped = result.step, batch.position + 1, batch.epoch, 0
        state.samples += result.samples
        if result.skipped and options.nonfinite_loss == "stop":
            state.request_stop(StopReason.NON_FINITE, f"the loss or its gradient is not finite in step {result.step + 1}")
        elif state.skipped >= MOST_SKIPPED_STEPS:
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


def reseed(run: Run, position: int) -> None:
    """Set this rank's generators for the batch at `position`: what chance the model itself takes (dropout) is then a function
    of seed, position and rank, so that no random state has to be saved and every resume is exact.
    """
    number = derive_seed(run.config[RunOptions].seed, position, run.world.rank) >> 1
    torch.manual_seed(number)
    random.seed(number)
