"""What hooks receive and return. Importing this module imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from smalti.errors import ExitCode
from smalti.rundir import Phases

if TYPE_CHECKING:
    from smalti.config import Config
    from smalti.rundir import RunWriter


# --- what plugins register ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which plugin something comes from, for messages."""

    plugin: str = "core"
    distribution: str = "smalti"
    version: str = ""
    built_in: bool = True

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({' '.join(filter(None, (self.distribution, self.version)))})"

    @property
    def workaround(self) -> str:
        """What a user can do about a defect of the plugin. Built-in plugins cannot be disabled or updated by themselves."""
        if self.built_in:
            return "report this as a defect of smalti"
        return f"update {self.distribution}, or disable the plugin with --without {self.plugin}"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Base of the entries that plugins register. `title` is shown to users. smalti sets `origin`; plugins leave it out."""

    kind: ClassVar[str]
    """What messages call such an entry, with an article."""
    name: str
    title: str
    origin: Origin = field(default=Origin(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class FamilyEntry(Registered):
    """A model family for `--model_family`.

    `factory` is "module:callable", imported only when the family is chosen. The callable takes the `Config` and returns a
    `smalti.models.ModelFamily`. `flavours` maps each variant to the path or hub id of its weights; it is empty if there is only
    one. `downloads` means that the factory may download weights; it is then called after all other checks of the configuration.
    """

    kind = "the model family"
    factory: str
    flavours: Mapping[str, str] = field(default_factory=dict)
    downloads: bool = False


@dataclass(frozen=True, kw_only=True)
class StorageEntry(Registered):
    """A storage of datasets, such as local folders. `name` is the value of the key `type` of a dataset.

    `factory` is "module:callable". The callable takes the `DatasetSpec` and returns a `smalti.data.Storage`. `keys` are the
    keys of its own that a dataset of this type may have. Their values are in the `storage_options` of the spec.

    `open_url`, "module:callable" too, takes a URL with one of the `schemes`, such as "s3", and returns the `Storage` of what
    is below it. With it, `smalti checkpoint` and `--resume_from_checkpoint` take such URLs in place of paths. The second
    argument is the `Config` of a run that resumes; None for other commands.
    """

    kind = "the storage"
    factory: str
    keys: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    open_url: str = ""


@dataclass(frozen=True, kw_only=True)
class MetadataEntry(Registered):
    """A source of file names, image sizes and captions. `name` is the value of the key `metadata_backend` of a dataset.

    `factory` is "module:callable". The callable takes the `DatasetSpec` and the `Storage` and returns a
    `smalti.data.datasets.sources.MetadataSource`.
    """

    kind = "the metadata backend"
    factory: str


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Registered):
    """An optimizer for `--optimizer`.

    `factory` is "module:callable", called as `factory(named_parameters, lr=..., **settings)`. `accepts` names the settings that
    it takes in addition to `lr`: some of `betas`, `eps` and `weight_decay`.

    `shards` says whether the optimizer works on sharded parameters (DTensors), `flat` whether it works on flat slices of
    parameters, as an elementwise optimizer does. An optimizer that does not work with the chosen strategy is refused before
    launch.
    """

    kind = "the optimizer"
    factory: str
    accepts: tuple[str, ...] = ("betas", "eps", "weight_decay")
    shards: bool = True
    flat: bool = True


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Registered):
    """What a plugin keeps between runs and can create again, for `smalti cache ls` and `smalti cache clear NAME`.

    `factory` is "module:callable" and returns a `smalti.plugins.caches.Cache`. It is called without arguments, or with the
    `Config` if the entry is marked `configured` because an option says where the cache is. `name` may have dashes.
    """

    kind = "the cache"
    factory: str
    configured: bool = False


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """The number of entries and of bytes that clearing a cache removed."""

    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat(Registered):
    """A format of checkpoints that `smalti checkpoint convert` reads.

    `marks` are glob patterns such as "manifest.json" or "*/model_states.pt". A folder in which a file matches one of them is
    read as this format. `factory` is "module:callable", imported only in the process that reads such a checkpoint. The callable
    takes the folder, a `Path`, and returns a `smalti.checkpoint.conversion.formats.Source`.
    """

    kind = "the checkpoint format"
    marks: tuple[str, ...]
    factory: str


# --- distribution ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process in the run. `device` is a torch device string such as "cuda:0".

    `context` is the number of consecutive ranks that work on the same samples, each on its part of the sequence (context
    parallelism). Data is distributed over groups of this many ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    device: str = "cpu"
    context: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The data-parallel rank, out of `data_size`: which part of each batch this rank works on."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        return self.size // self.context


@dataclass(frozen=True, kw_only=True)
class DistributedPlan(Registered):
    """How a strategy is launched, and where its `Parallel` is found.

    `parallel` is "module:callable". It is called on every rank as `callable(config)`, joins the process group, and
    returns a `smalti.parallel.Parallel`.

    `accelerate` is merged into the Accelerate YAML, where None removes a key. `environment` is added to the environment of the
    workers. `settings` are the settings of the strategy itself, in JSON's types, for `--dry-run`.

    `context` consecutive ranks work on the same samples, so the effective batch counts such groups. With `splits_heads` each of
    them computes some heads of attention. `shards` means that a rank holds parts of parameters, `flattens_parameters` that the
    optimizer sees them as flat slices: an optimizer that cannot work on those is refused.

    `check_model`, if given, is "module:callable" too. The launcher calls it before it starts a rank, as `callable(config,
    model)` with the family's model on the meta device; it raises UserError for a model that the strategy cannot train.

    A plan that is marked `fallback` is used when no other plugin returns a plan.
    """

    kind = "the strategy"
    parallel: str
    accelerate: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    context: int = 1
    splits_heads: bool = False
    shards: bool = False
    flattens_parameters: bool = False
    check_model: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """A repeated module of the model: the unit of sharding, activation checkpointing and compilation.

    `path` is the module's name in the model. `parameters` counts all parameters in it. With `reshard` false, its parameters
    stay gathered between forward and backward, which is useful for the last block.
    """

    path: str
    class_name: str
    parameters: int
    reshard: bool = True


# --- the run --------------------------------------------------------------------------------------------------------


class StopReason(IntEnum):
    """Why a run leaves the loop. Ranks agree on the largest value, so the worst reason is used."""

    NONE = 0
    COMPLETED = 1
    REQUESTED = 2
    PREEMPTED = 3
    INTERRUPTED = 4
    ERROR_BUDGET = 5
    SAVE_FAILED = 6
    NON_FINITE = 7
    FAULT = 8
    FAULT_SUSPECT = 9
    FAULT_UNSAVED = 10

    @property
    def exit_code(self) -> ExitCode:
        return {
            StopReason.REQUESTED: ExitCode.STOPPED,
            StopReason.PREEMPTED: ExitCode.PREEMPTED,
            StopReason.INTERRUPTED: ExitCode.INTERRUPTED,
            StopReason.ERROR_BUDGET: ExitCode.FAILED,
            StopReason.SAVE_FAILED: ExitCode.FAILED,
            StopReason.NON_FINITE: ExitCode.FAILED,
            StopReason.FAULT: ExitCode.GPU_FAULT,
            StopReason.FAULT_SUSPECT: ExitCode.GPU_FAULT,
            StopReason.FAULT_UNSAVED: ExitCode.GPU_FAULT,
        }.get(self, ExitCode.DONE)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is saved at this point."""
        return self not in (StopReason.SAVE_FAILED, StopReason.NON_FINITE, StopReason.FAULT_UNSAVED)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the reason that the ranks agreed on, and one sentence about it."""

    reason: StopReason
    message: str

    @property
    def exit_code(self) -> ExitCode:
        return self.reason.exit_code


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What is known about a run as soon as its ranks are connected. The same on every rank but for `world` and `phases`.

    `plugins` are "name distribution version" lines. `phases` is what this rank is doing, with its progress.
    """

    id: str
    directory: Path
    world: World
    config: Config
    strategy: str
    plugins: tuple[str, ...]
    phases: Phases = field(default_factory=Phases, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class RunInfo(RankInfo):
    """What an observer needs to know about a run when its loop starts. The same on every rank but for `world` and `writer`.

    `parameters` and `trainable` count elements over all ranks. `timesteps` describes the noise levels at which the run trains.
    `writer` writes to the run directory; it is set on the main rank only, for the plugin that writes the events.
    """

    family: str
    parameters: int
    trainable: int
    effective_batch: int
    timesteps: str
    writer: RunWriter | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. The values are the same on every rank, but for the last five.

    `forward_seconds` is the time of the forward passes of this rank; None if unknown. The last four are set on the main rank
    only, else None.

    `samples` is the effective batch, `seconds` the wall time of the step and `data_seconds` the wait for its data. `skipped`
    means that the step changed nothing, because the loss was not finite.

    `mfu` is the model FLOPs utilization (`smalti.training.utilization`). `peak_memory_mb` is the peak memory of the main rank's
    device since the last logged step, in MiB, or of its process on the CPU. Both are set on logged steps only. `smoothed_loss`
    and `recent_samples_per_second` are the values of the console (`smalti.rundir.recent`).
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    seconds: float
    data_seconds: float = 0.0
    skipped: bool = False
    forward_seconds: float | None = None
    mfu: float | None = None
    peak_memory_mb: float | None = None
    smoothed_loss: float | None = None
    recent_samples_per_second: float | None = None


@dataclass
class RunState:
    """The progress of the run, and requests to it. Hooks may read everything and call the `request_` methods.

    `step` counts optimizer steps, `position` global batches (the position in the data), `skipped` the steps in a row that were
    skipped just now. A request may be made on one rank alone; the ranks agree on requests at the next step boundary.
    `max_steps` is 0 until the data were read. `resumed` is the step at which this launch began, None before that is known.
    """

    max_steps: int
    step: int = 0
    position: int = 0
    epoch: int = 0
    samples: int = 0
    skipped: int = 0
    stop_reason: StopReason = StopReason.NONE
    stop_message: str = ""
    save_requested: bool = False
    validation_requested: bool = False
    resumed: int | None = None
    _faults: deque[GpuFault] = field(default_factory=deque, repr=False, compare=False)

    def request_stop(self, reason: StopReason, message: str = "") -> None:
        """Stop at the next step boundary. A larger reason replaces a smaller one. Default of `message`: the reason and step."""
        if reason > self.stop_reason:
            self.stop_reason, self.stop_message = reason, message

    def request_save(self) -> None:
        """Save a checkpoint at the next step boundary."""
        self.save_requested = True

    def request_validation(self) -> None:
        """Generate validation images at the next step boundary."""
        self.validation_requested = True

    def report_fault(self, fault: GpuFault) -> None:
        """Report a fault of an accelerator that raised no exception. On any rank, in any phase, from any thread.

        `on_gpu_fault` is called for it on this rank, at the next step boundary; the ranks then agree on its action. Before the
        loop, and where the loop does not reach a boundary, it is called in another thread.
        """
        self._faults.append(fault)

    @property
    def has_faults(self) -> bool:
        """Whether faults were reported that `take_faults` has not returned."""
        return bool(self._faults)

    def take_faults(self) -> list[GpuFault]:
        """The faults reported since the last call, the oldest first. Each is returned once, to one thread."""
        taken = []
        while self._faults:
            with suppress(IndexError):  # another thread has just taken it
                taken.append(self._faults.popleft())
        return taken


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete, visible checkpoint. `size` is in bytes.

    `seconds` is the duration of the save, `blocked` the part of it for which training waited.
    """

    step: int
    path: Path
    size: int
    seconds: float
    blocked: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ValidationImage:
    """One validation image on disk, with its prompt and seed.

    `base` is the image of the model before training with the same settings, None without `validation_base_model`.
    """

    prompt: str
    seed: int
    path: Path
    base: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """The images of one validation, all of them in `folder`. Those of step 0 are of the model before training."""

    step: int
    images: tuple[ValidationImage, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The loss on held-out images: the mean over `samples` images and the timesteps of `by_timestep`.

    `averaged` means that it was measured with the EMA of the weights.
    """

    step: int
    loss: float
    by_timestep: Mapping[int, float]
    samples: int
    averaged: bool
    seconds: float


# --- health ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GpuFault:
    """A fault of an accelerator. `kind` is a short machine-readable word ("cuda_error", "ecc", "lost", "thermal", "hang").

    `severity` is "warning" if the device still works. `memory`: its memory may be corrupt, so checkpoints are suspect.
    `reading` is what a monitor has read, in JSON's types: index, name, uuid, temperature_celsius, ecc_errors_single,
    ecc_errors_double, throttle_reasons, memory_used_percent, xid. It is empty for an error of the CUDA runtime.
    """

    kind: str
    message: str
    device: str
    rank: int
    severity: Literal["warning", "critical"] = "critical"
    memory: bool = False
    reading: Mapping[str, object] = field(default_factory=dict)


class FaultAction(IntEnum):
    """What to do about a fault of an accelerator. The largest action of all plugins is used, and of all ranks.

    A fault that was reported (`RunState.report_fault`) lets the running step end: all ranks stop at the same step boundary, and
    save together unless the action is STOP_UNSAVED.

    A fault that is an exception in a step skips that step in a single process, which changes no weights. Every action becomes
    STOP_UNSAVED if the fault happened while the weights were being changed, or if `--max_skipped_steps` steps in a row were
    skipped. One of several ranks cannot continue alone, because the others wait for its gradients. It exits, and the run ends
    with exit code 5. A healthy rank that holds the complete state then saves it as of the last step boundary; after
    STOP_SUSPECT and STOP_UNSAVED it marks that checkpoint as suspect. If the ranks hold shards, the last checkpoint remains.
    """

    CONTINUE = 0
    """Continue with the next batch."""
    CHECKPOINT = 1
    """Save a checkpoint and continue. If the state cannot be read from the device, the run ends with exit code 5."""
    STOP_SAVED = 2
    """Save a checkpoint and stop with exit code 5."""
    STOP_SUSPECT = 3
    """Save a checkpoint that is marked as suspect, and stop with exit code 5."""
    STOP_UNSAVED = 4
    """Stop with exit code 5 without a checkpoint of this rank: its state cannot be trusted, or cannot be read any more."""
