"""What hooks know of a run and its progress. Importing this module imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.errors import ExitCode
from smalti.rundir import Phases
from smalti.types.distribution import World
from smalti.types.results import GpuFault

if TYPE_CHECKING:
    from smalti.config import Config
    from smalti.rundir import RunWriter


class StopReason(IntEnum):
    """Why a run leaves the loop. Ranks agree on the largest value, so the worst reason is used.

    UNSAVED: preempted, with too little time for a save.
    """

    NONE = 0
    COMPLETED = 1
    REQUESTED = 2
    PREEMPTED = 3
    INTERRUPTED = 4
    UNSAVED = 5
    ERROR_BUDGET = 6
    DISK_LOW = 7
    SAVE_FAILED = 8
    NON_FINITE = 9
    FAULT = 10
    FAULT_SUSPECT = 11
    FAULT_UNSAVED = 12
    TAKEN_OVER = 13

    @property
    def exit_code(self) -> ExitCode:
        return {
            StopReason.REQUESTED: ExitCode.STOPPED,
            StopReason.PREEMPTED: ExitCode.PREEMPTED,
            StopReason.INTERRUPTED: ExitCode.INTERRUPTED,
            StopReason.UNSAVED: ExitCode.KILLED,
            StopReason.ERROR_BUDGET: ExitCode.FAILED,
            StopReason.DISK_LOW: ExitCode.FAILED,
            StopReason.SAVE_FAILED: ExitCode.FAILED,
            StopReason.NON_FINITE: ExitCode.FAILED,
            StopReason.FAULT: ExitCode.GPU_FAULT,
            StopReason.FAULT_SUSPECT: ExitCode.GPU_FAULT,
            StopReason.FAULT_UNSAVED: ExitCode.GPU_FAULT,
            StopReason.TAKEN_OVER: ExitCode.TAKEN_OVER,
        }.get(self, ExitCode.DONE)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is saved at this point."""
        return self not in (
            StopReason.UNSAVED,
            StopReason.SAVE_FAILED,
            StopReason.NON_FINITE,
            StopReason.FAULT_UNSAVED,
            StopReason.TAKEN_OVER,
        )


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
    """What is known about a run as soon as its ranks are connected. The same on every rank but for `world`, `phases`, `writer`.

    `plugins` are "name distribution version" lines. `phases` is what this rank is doing, with its progress. `started` is when
    this launch began, which distinguishes it from others in the run directory; None if that is unknown. `writer` writes to the
    run directory; it is set on the main rank only.
    """

    id: str
    directory: Path
    world: World
    config: Config
    strategy: str
    plugins: tuple[str, ...]
    started: float | None = None
    phases: Phases = field(default_factory=Phases, repr=False, compare=False)
    writer: RunWriter | None = None


@dataclass(frozen=True, kw_only=True)
class RunInfo(RankInfo):
    """What an observer needs to know about a run when its loop starts, in addition.

    `parameters` and `trainable` count elements over all ranks. `timesteps` describes the noise levels at which the run trains.
    `periodic` are the names of what the run does between steps, such as "validation".
    """

    family: str
    parameters: int
    trainable: int
    effective_batch: int
    timesteps: str
    periodic: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The samples of a step on one rank, in the order of its micro-batches.

    `numbers` are unique over the run: position of the batch times effective batch, plus the place in it. `keys` are
    "DATASET/KEY", "" for an image that could not be replaced. `fractions` are noise levels, from 0 (the image) to 1. `losses`
    are means over an image, of which masks leave out parts; noise level and `loss_weight` have no weight in them. Not a number
    where nothing counts.
    """

    numbers: Sequence[int]
    keys: Sequence[str]
    fractions: Sequence[float]
    losses: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. The values are the same on every rank, but for the last six.

    `visits` are the samples of this rank, alike on ranks that work on the same ones. `forward_seconds` is the time of its
    forward passes; None if unknown. The last four are set on the main rank only, else None.

    `samples` is the effective batch, `seconds` the wall time of the step and `data_seconds` the wait for its data. `skipped`
    means that the step changed nothing, because the loss was not finite. `parts` are the terms of the loss by name, weighted,
    so that they add up to it; None if there is only one.

    `mfu` is the model FLOPs utilization (`smalti.training.metrics`). `peak_memory_mb` is the peak memory of the main rank's
    device since the last logged step, in MiB, or of its process on the CPU. Both are set on logged steps only. `smoothed_loss`
    and `recent_samples_per_second` are the values of the console (`smalti.rundir.events`).
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    seconds: float
    data_seconds: float = 0.0
    skipped: bool = False
    parts: Mapping[str, float] | None = None
    visits: Visits | None = None
    forward_seconds: float | None = None
    mfu: float | None = None
    peak_memory_mb: float | None = None
    smoothed_loss: float | None = None
    recent_samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepBoundary:
    """What is known between two steps, before the ranks agree on what they do there.

    `agreed` is the reason to stop that they have agreed on; NONE before. `saves` means that this rank is for saving a
    checkpoint now, `validates` for any periodic work, `saving` that an earlier save has not ended. `warn` reports
    something that failed, in a sentence and as an exception, to the log and to all observers.
    """

    agreed: StopReason = StopReason.NONE
    saves: bool = False
    validates: bool = False
    saving: bool = False
    warn: Callable[[str, Exception], None]


@dataclass
class RunState:
    """The progress of the run, and requests to it. Hooks may read everything and call the `request_` methods.

    `step` counts optimizer steps, `position` global batches (the position in the data), `skipped` the steps in a row that were
    skipped just now. A request may be made on one rank alone; the ranks agree on requests at the next step boundary.
    `max_steps` is 0 until the data were read. `resumed` is the step at which this launch began, None before that is known.
    `check_before_step` is to be set before the first step, alike on all ranks: whether the result of a step is known before any
    weight changes; if not, `step` counts the one that is not known yet. None leaves it to smalti.
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
    check_before_step: bool | None = None
    stop_requested_at: float | None = field(default=None, compare=False)
    _faults: deque[GpuFault] = field(default_factory=deque, repr=False, compare=False)

    def request_stop(self, reason: StopReason, message: str = "", *, since: float | None = None) -> None:
        """Stop at the next step boundary. A larger reason replaces a smaller one. Default of `message`: the reason and step.

        `since` is when that was asked for, on the clock of `time.monotonic`; by default now.
        """
        if self.stop_requested_at is None:
            self.stop_requested_at = time.monotonic() if since is None else since
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
