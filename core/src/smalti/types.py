"""The values that cross a seam: what hooks receive and return. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from smalti.errors import ExitCode

if TYPE_CHECKING:
    from smalti.config import Config
    from smalti.rundir import RunWriter


# --- what plugins register ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which plugin something comes from, for messages. `built_in` ones cannot be left out or updated alone."""

    plugin: str = "core"
    distribution: str = "smalti"
    version: str = ""
    built_in: bool = True

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({' '.join(filter(None, (self.distribution, self.version)))})"

    @property
    def way_round(self) -> str:
        """What a user can do about a defect in it."""
        if self.built_in:
            return "report this as a defect of smalti"
        return f"update {self.distribution}, or leave the plugin out with --without {self.plugin}"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """What the entries that plugins register have in common. `origin` is filled in by smalti when the entry is gathered."""

    kind: ClassVar[str]
    """What messages call such an entry, with its article."""
    name: str
    title: str
    origin: Origin = field(default=Origin(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class FamilyEntry(Registered):
    """A model family on offer. `factory` is "module:callable", imported only when the family is chosen.

    The callable takes the `Config` and returns a `smalti.models.ModelFamily`. `flavours` maps a flavour to the path
    or hub id of its weights; empty when the family has only one. `downloads` says that making the family may
    fetch weights that are not on this machine: then it is made only once nothing else is wrong.
    """

    kind = "the model family"
    factory: str
    flavours: Mapping[str, str] = field(default_factory=dict)
    downloads: bool = False


@dataclass(frozen=True, kw_only=True)
class StorageEntry(Registered):
    """A place where datasets can live. `name` is the `type` of a dataset ("local", "aws").

    `factory` is "module:callable"; the callable takes the `DatasetSpec` and returns a `smalti.data.Storage`. `keys` are
    what a dataset of this type may say besides what every dataset may; the factory finds them in `storage_options`.
    """

    kind = "the storage"
    factory: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MetadataEntry(Registered):
    """A way to learn names, sizes and captions. `name` is the `metadata_backend` of a dataset ("discovery", "json").

    `factory` is "module:callable"; the callable takes the `DatasetSpec` and the `Storage` and returns a
    `smalti.data.datasets.sources.MetadataSource`.
    """

    kind = "the metadata backend"
    factory: str


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Registered):
    """An optimizer on offer under `--optimizer NAME`.

    `factory` is "module:callable", called as `factory(named_parameters, **settings)`; `accepts` names the settings that
    it takes besides `lr`, out of `betas`, `eps` and `weight_decay`. `shards` says whether it works on parameters of which a
    rank holds a part (DTensors), `flat` whether it works on parts without shape, as one does that treats each number by itself;
    one that does not is refused before launch where the strategy makes such.
    """

    kind = "the optimizer"
    factory: str
    accepts: tuple[str, ...] = ("betas", "eps", "weight_decay")
    shards: bool = True
    flat: bool = True


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Registered):
    """Something that a plugin keeps between runs and can make again: `smalti cache ls`, `smalti cache clear NAME`.

    `factory` is "module:callable", called without arguments; it gives a `smalti.plugins.caches.Cache`. `name` may have dashes.
    If the configuration says where the cache is, `configured` is set and the factory is called with the `Config`.
    """

    kind = "the cache"
    factory: str
    configured: bool = False


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What went when a cache was cleared: how many entries, and how many bytes."""

    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat(Registered):
    """A format of checkpoints that `smalti checkpoint convert` reads.

    `marks` are patterns for paths in a checkpoint's folder ("manifest.json", "*/model_states.pt"): a folder in which a file
    fits any of them is taken for this format. `factory` is "module:callable", imported only in the process that reads such a
    checkpoint; the callable takes its folder, a `Path`, and returns a `smalti.checkpoint.conversion.formats.Source`.
    """

    kind = "the checkpoint format"
    marks: tuple[str, ...]
    factory: str


# --- distribution ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among the others. `device` is a torch device string such as "cuda:0".

    `context` neighbouring ranks work on the same samples, each on its part of the sequence; data is spread over such groups.
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
        """Which share of every batch this rank works on, out of `data_size`."""
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
    """A repeated unit of the model, the grain of sharding, recomputation and compilation.

    `path` is the module's name in the model; `parameters` counts recursively. `reshard` false keeps the unit gathered
    between forward and backward (worth it for the last one).
    """

    path: str
    class_name: str
    parameters: int
    reshard: bool = True


# --- the run --------------------------------------------------------------------------------------------------------


class StopReason(IntEnum):
    """Why a run leaves the loop. Ranks agree on the largest value, so a worse reason always wins."""

    NONE = 0
    COMPLETED = 1
    REQUESTED = 2
    PREEMPTED = 3
    INTERRUPTED = 4
    ERROR_BUDGET = 5
    SAVE_FAILED = 6
    NON_FINITE = 7
    FAULT = 8
    FAULT_UNSAVED = 9

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
            StopReason.FAULT_UNSAVED: ExitCode.GPU_FAULT,
        }.get(self, ExitCode.DONE)

    @property
    def saves(self) -> bool:
        """Whether the state at this point is worth a checkpoint."""
        return self not in (StopReason.SAVE_FAILED, StopReason.NON_FINITE, StopReason.FAULT_UNSAVED)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the agreed reason and one sentence about it."""

    reason: StopReason
    message: str

    @property
    def exit_code(self) -> ExitCode:
        return self.reason.exit_code


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What an observer needs to know about a run when it starts. The same on every rank but for `world` and `writer`.

    `parameters` and `trainable` count elements over all ranks; `timesteps` says in words at which noise levels the run trains;
    `plugins` are "name distribution version" lines. `writer` writes to the run directory; it is set on the main rank only, for
    the plugin that writes the events.
    """

    id: str
    directory: Path
    world: World
    config: Config
    family: str
    strategy: str
    parameters: int
    trainable: int
    effective_batch: int
    timesteps: str
    plugins: tuple[str, ...]
    writer: RunWriter | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, the same on every rank but for what only the main rank has: the last four, two of them when it logs.

    `samples` is the effective batch; `seconds` is wall time. `skipped` is true when the loss was not finite and the policy was
    to skip: then nothing was changed by this step. `mfu` is the share of what all devices can make that went into the model
    (`smalti.training.utilization`), `peak_memory_mb` the most that the main rank's device held since the last logged step, in
    MiB, or on the CPU its process ever. `smoothed_loss` and `recent_samples_per_second` are what people are shown
    (`smalti.rundir.recent`). None where they are not known.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    seconds: float
    data_seconds: float = 0.0
    skipped: bool = False
    mfu: float | None = None
    peak_memory_mb: float | None = None
    smoothed_loss: float | None = None
    recent_samples_per_second: float | None = None


@dataclass
class RunState:
    """Where the run stands, and what was asked of it. Hooks may read everything and call the `request_` methods.

    `step` counts optimizer steps, `position` global batches handed out (the data position: one number), `skipped` the steps
    in a row that were left out just now. Requests are local to the rank that makes them; the loop agrees on them at the next
    step boundary.
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

    def request_stop(self, reason: StopReason, message: str = "") -> None:
        """Ask for a stop; a worse reason replaces a milder one. Without a message it is told by its name and the last step."""
        if reason > self.stop_reason:
            self.stop_reason, self.stop_message = reason, message

    def request_save(self) -> None:
        self.save_requested = True

    def request_validation(self) -> None:
        self.validation_requested = True


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete, visible checkpoint. `size` is in bytes.

    `seconds` is how long the save took, `blocked` how long training waited for it.
    """

    step: int
    path: Path
    size: int
    seconds: float
    blocked: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ValidationImage:
    """One validation picture on disk, with what made it."""

    prompt: str
    seed: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """The images of one validation, all of them in `folder`."""

    step: int
    images: tuple[ValidationImage, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The loss on held-out pictures: the mean over `samples` of them and over the timesteps of `by_timestep`.

    `averaged`: with the moving average of the weights instead of the weights themselves.
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
    """A fault of an accelerator. `kind` is a short machine-readable word ("cuda_error", "ecc", "lost", "thermal")."""

    kind: str
    message: str
    device: str
    rank: int


class FaultAction(IntEnum):
    """What to do about a fault of an accelerator; the largest answer over plugins wins.

    In a single process the step in which it happened is left out: nothing of it is in the weights. Where the fault struck while
    the weights were being changed, and where `--max_skipped_steps` steps in a row were left out, every answer is STOP_UNSAVED.

    One of several ranks cannot go on alone, because the others wait for its gradients. It leaves, and the run ends with exit
    code 5. A healthy rank that holds the whole state then saves the last step boundary; after STOP_UNSAVED it marks that as
    suspect. Where ranks hold shards, the last checkpoint counts.
    """

    CONTINUE = 0
    """Go on with the next batch."""
    CHECKPOINT = 1
    """Save, and go on with the next batch. The state is read from the device: if that fails, the run ends with exit code 5."""
    STOP_SAVED = 2
    """Save, and stop with exit code 5."""
    STOP_UNSAVED = 3
    """Stop with exit code 5 and write nothing, as when the state cannot be trusted or not be read any more."""
