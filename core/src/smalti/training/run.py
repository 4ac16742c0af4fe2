"""One rank's view of the run, in the three stages in which it comes about: `Context`, `Assembled`, `Run`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from smalti.config import Config, RunOptions, TrackingOptions, TrainingOptions
from smalti.data import Batch, DatasetSpec, Encoded, Loader, PreparedData
from smalti.hookspecs import HookSpecs
from smalti.models import ModelFamily
from smalti.parallel import Boundary, FailureDetector, Parallel
from smalti.plugins import Backend, Plugins
from smalti.rundir import Ownership, Phases, RunDirectory, RunWriter, SmoothedMetrics
from smalti.system import derive_seed
from smalti.training.failures.disk_space import DiskSpace
from smalti.training.failures.step_times import ForwardTime, StepTimes
from smalti.training.loss import DenoisingLoss
from smalti.training.metrics import Memory, Utilisation, log_metrics, metrics_of
from smalti.types import Block, DistributedPlan, RankInfo, RunInfo, RunState, StepResult, StopReason, Visits, World

if TYPE_CHECKING:  # the launcher, which checks a run, needs none of it
    from torch.optim.lr_scheduler import LambdaLR

    from smalti.checkpoint import CheckpointStore, SaveError, Saver
    from smalti.training.optim.ema import WeightAverage


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """A step that the device was asked for. `read` waits for the parts of its loss, the norm of its gradients,
    and the loss of each visit.

    `batch` is without its tensors. `begun_at`: step and skipped steps of the state before it. `seconds` are those of asking.
    """

    batch: Batch
    visits: Visits
    read: Callable[[], Sequence[float]]
    begun_at: tuple[int, int]
    learning_rate: float
    seconds: float
    data_seconds: float
    forward_time: ForwardTime


MOST_SKIPPED_STEPS = 10
"""Steps in a row that are skipped for a loss that is not finite or a fault of the accelerator, before the run stops."""


@runtime_checkable
class StepsInBackward(Protocol):
    """An optimizer that steps each parameter in the backward pass, as soon as its gradient is there, and frees the gradient.

    `steps` is set before each pass: without it gradients are freed and nothing changes. `step` follows as with any optimizer.
    """

    steps: bool

    def released_norm(self) -> Tensor:
        """The global norm of the gradients of the last pass, before any clipping; 0 after one without steps. *Collective*.

        Where it is not finite, weights are wrong already: raises a UserError on every rank, which ends the run unsaved.
        """


@dataclass(kw_only=True)
class Context:
    """What a rank has before anything is built on it: `smalti.launch.rank` makes it once the ranks are connected.

    `writer` writes to the run directory, on the main rank only. `phases` is what this rank is doing; reported on the main rank.
    """

    config: Config
    plugins: Plugins
    plan: DistributedPlan
    parallel: Parallel
    detector: FailureDetector
    writer: RunWriter | None
    state: RunState
    phases: Phases
    info: RankInfo
    periodic: Sequence[PeriodicWork] = ()
    """What all ranks do between steps, the same on each; `build` gets it from the plugins."""

    @classmethod
    def of(
        cls,
        config: Config,
        plugins: Plugins,
        plan: DistributedPlan,
        parallel: Parallel,
        detector: FailureDetector,
        state: RunState,
        writer: RunWriter | None = None,
    ) -> Context:
        directory = directory_of(config)
        record, phases = directory.record(), writer.phases if writer is not None else Phases()
        info = RankInfo(
            id=record.id if record else "",
            directory=directory.path,
            world=parallel.world,
            config=config,
            strategy=plan.title,
            plugins=plugins.versions,
            started=record.started if record else None,
            phases=phases,
            writer=writer,
        )
        return cls(
            config=config,
            plugins=plugins,
            plan=plan,
            parallel=parallel,
            detector=detector,
            writer=writer,
            state=state,
            phases=phases,
            info=info,
        )

    @property
    def world(self) -> World:
        return self.parallel.world

    @property
    def directory(self) -> RunDirectory:
        return directory_of(self.config)


@dataclass(kw_only=True)
class Assembled(Context):
    """With model, optimizer and data: what a checkpoint is loaded into and written from."""

    info: RunInfo
    backend: Backend
    """The hooks with all backends but the chosen one left out; for the backend roles."""
    ownership: Ownership
    """Whether this launch still owns the run directory."""
    boundary: Boundary
    family: ModelFamily
    model: nn.Module
    model_config: str
    """The model's own description for other tools, as JSON text; "" if it has none."""
    adapter: dict[str, object] | None
    """What the adapter is, if the run trains one."""
    blocks: list[Block]
    optimizer: torch.optim.Optimizer
    ema: WeightAverage | None
    loss: DenoisingLoss
    data: PreparedData
    encoded: Encoded
    checkpoints: CheckpointStore
    data_changes: list[object] = field(default_factory=list)
    """At which steps the run was continued on changed data, and what had changed; for people, and JSON-able."""

    @property
    def effective_batch(self) -> int:
        return self.data.order.effective_batch


@dataclass(kw_only=True)
class Run(Assembled):
    """One rank's view of the run. The loop reads it; only `advance` and the checkpoint code change it."""

    saver: Saver
    scheduler: LambdaLR
    batches: Loader
    disk_space: DiskSpace
    step_times: StepTimes = field(default_factory=StepTimes)
    recent: SmoothedMetrics = field(default_factory=SmoothedMetrics)
    utilisation: Utilisation
    memory: Memory
    older_checkpoints: frozenset[str] = frozenset()
    """The names in the folder of checkpoints when the loop began: what other launches saved."""
    saved_step: int | None = None
    """The step of the newest checkpoint that all ranks know to be saved."""
    save_failure: SaveError | None = None
    """Why the latest checkpoint could not be written; None if it was."""
    queued: QueuedStep | None = None
    """The latest step, until it counts (`settle`)."""
    parted: bool = False
    """Whether this rank may be out of step with the others, so that it must not wait for them; only at the very end."""

    @cached_property
    def looks_back(self) -> bool:
        """Whether the result of a step is read while the next one computes; else before any weight changes.

        Asked for by `RunState.check_before_step`; of its own accord only where nothing could be saved of a rank that loses
        others in a step. The optimizer has to leave out a step by itself, on the device, and the device to compute by itself.
        """
        from smalti.parallel import ProcessGroupParallel  # which the launcher does not need

        parallel, asked = self.parallel, self.state.check_before_step
        if asked is None:
            unsaved = self.world.size == 1 or parallel.local_communicator() is None
            asked = not unsaved or torch.device(self.world.device).type != "cuda"
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False)  # what torch's GradScaler goes by
        usual = getattr(type(parallel), "step", None) is ProcessGroupParallel.step
        there = {parameter.device for parameter in self.model.parameters() if parameter.requires_grad}
        return not asked and skips and usual and len(there | {self.family.device}) == 1

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch. *Collective* in the last one, and with an optimizer that `StepsInBackward`."""
        if isinstance(self.optimizer, StepsInBackward):
            self.optimizer.steps = math.isfinite(float(self.parallel.mean(loss.detach())))
            self.leave_boundary()
        self.parallel.backward(loss)

    def leave_boundary(self) -> None:
        """From here on weights, optimizer state and EMA may change: nothing copies them any more."""
        self.saver.wait_for_staging()
        if self.ema is not None:
            self.ema.wait()
        self.boundary.leave()

    def clip_gradients(self) -> Tensor:
        """Clip as the options say; returns the global norm before. *Collective*."""
        if isinstance(self.optimizer, StepsInBackward):
            return self.optimizer.released_norm()
        options, parallel = self.config[TrainingOptions], self.parallel
        clip = parallel.clip_gradient_values if options.grad_clip_method == "value" else parallel.clip_gradients
        return clip(options.max_grad_norm)

    def check(self, losses: Tensor, norm: Tensor, samples: Sequence[Tensor]) -> tuple[Callable[[], Sequence[float]], bool]:
        """What gives losses (P,), norm and losses of `samples` as numbers, and whether the optimizer steps.

        It does always where the run `looks_back`. Only the first two have to be finite.
        """
        count = len(losses)
        if not self.looks_back:
            numbers = torch.cat((losses, *samples)).cpu().tolist()
            numbers.insert(count, float(norm))
            return lambda: numbers, all(map(math.isfinite, numbers[: count + 1]))
        values = torch.cat((losses.float(), norm.float().view(1), *samples))
        self.optimizer.found_inf = 1 - values[: count + 1].isfinite().all().float()  # type: ignore[attr-defined]
        there, device = values.to("cpu", non_blocking=True), torch.device(self.world.device)  # pinned memory
        ready = None if device.type == "cpu" else torch.Event(device)
        if ready is not None:
            ready.record()

        def read() -> Sequence[float]:
            if ready is not None:
                ready.synchronize()
            return cast(list[float], there.tolist())

        return read, True

    def settle(self) -> float:
        """Count the step that was queued last, if there is one that does not count yet; the seconds that this took.

        Waits until the device has its loss and its norm. Then come the learning rate of the next step, EMA, and observers.
        """
        queued, self.queued, begin = self.queued, None, time.perf_counter()
        if queued is None:
            return 0.0
        state = self.state
        state.step, state.skipped = queued.begun_at
        count, numbers = len(self.loss.names), queued.read()
        parts, norm = numbers[:count], numbers[count]
        loss = sum(parts)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.scheduler.step()
            if self.ema is not None:
                self.ema.update(state.step + 1)
        result = StepResult(
            step=state.step + int(finite),
            loss=loss,
            grad_norm=norm,
            learning_rate=queued.learning_rate,
            samples=self.effective_batch,
            seconds=queued.seconds + time.perf_counter() - begin,
            data_seconds=queued.data_seconds,
            skipped=not finite,
            forward_seconds=queued.forward_time.seconds(),
            parts=dict(zip(self.loss.names, parts, strict=True)) if len(parts) > 1 else None,
            visits=replace(queued.visits, losses=numbers[count + 1 :]),
        )
        self.finish_step(queued.batch, result)
        return time.perf_counter() - begin

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Count a step that is done, and show it to everybody."""
        result = self.measure(batch, result)
        self.advance(batch, result)
        self.plugins.notify(HookSpecs.on_step_end, state=self.state, result=result)
        self.report(result)

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


class PeriodicWork:
    """Something that all ranks do together between two steps; one object for each rank. See `smalti.PeriodicEntry`.

    `name` is for messages: "NAME of step 5 failed". `texts` and `negative_texts` are captions and negative prompts that `run`
    uses: with `--text_cache_disable` off they are encoded ahead, and `run.encoded.conditioning` returns them. `inputs` says in
    a few words what was read in addition to the configuration; ranks with different ones refuse to train.
    """

    name: str
    texts: Sequence[str] = ()
    negative_texts: Sequence[str] = ()
    inputs: str = ""

    def check(self, family: ModelFamily, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        """Notices about settings without effect. Raises UserError or ConfigError for what cannot be done.

        Called in the launcher, before anything is launched.
        """
        return ()

    def start(self, run: Run) -> None:
        """What comes before the first step of a launch. *Collective*. Use `attempt` for what the run can do without."""

    def is_due(self, run: Run) -> bool:
        """Whether this rank is for doing it after the step that is done, also the last. Done if any rank is for it."""
        raise NotImplementedError

    def run(self, run: Run) -> None:
        """Do it. *Collective*. Training continues after an AttemptFailed, which every rank has to raise together."""
        raise NotImplementedError

    def rehearsal(self, run: Run) -> Callable[[], object] | None:
        """What needs as much memory as `run`, in little time and writing nothing; None if that is no more than a step's.

        For a planner, which calls it with tensors without values.
        """
        return None


def visits_of(batch: Batch, fractions: Sequence[Tensor]) -> Visits:
    """The visits of a step, of each micro-batch (B,) noise levels in host memory. Their losses are not known yet."""
    return Visits(
        numbers=[number for micro in batch.micro for number in micro.numbers],
        keys=[key for micro in batch.micro for key in micro.keys],
        fractions=[fraction for micro in fractions for fraction in micro.tolist()],
    )


def directory_of(config: Config) -> RunDirectory:
    """The run directory of a checked configuration."""
    return RunDirectory(cast(Path, config[RunOptions].output_dir))


def reseed(run: Run, position: int) -> None:
    """Set this rank's generators for the batch at `position`: what chance the model itself takes (dropout) is then a function
    of seed, position and rank, so that no random state has to be saved and every resume is exact.
    """
    number = derive_seed(run.config[RunOptions].seed, position, run.world.rank) >> 1
    torch.manual_seed(number)
    random.seed(number)
