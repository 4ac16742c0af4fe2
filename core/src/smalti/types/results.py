"""What a run has written, measured or diagnosed, and the faults of accelerators. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal


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

    `averaged` means that it was measured with the EMA of the weights. `factors` names the terms that multiply the errors, such
    as masks: losses can be compared with those of runs with the same ones.
    """

    step: int
    loss: float
    by_timestep: Mapping[int, float]
    samples: int
    averaged: bool
    seconds: float
    factors: Sequence[str] = ()


FindingLevel = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class RunValue:
    """A column of `smalti run ls`, for one run. `text` stands in the table, `value` in the JSON."""

    name: str
    text: str
    value: object


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `smalti doctor`. `check` is what was checked, in one or a few words; several findings may have the same.

    "error" means that training could not work, "warning" that it may fail or be slow, "note" what is good to know, "ok" that
    the check has found nothing wrong. A warning and an error have a `fix`. `node` is the node that it is about; empty for this
    one.
    """

    check: str
    level: FindingLevel
    message: str
    fix: str = ""
    node: str = ""


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
    save together unless the action is STOP_UNSAVED. Then the lowest rank without the fault saves a checkpoint marked as
    suspect, if each rank holds the whole state. A rank that does not reach the boundary within 5 seconds and the time of two
    steps exits, and the others treat it as lost. Before the loop a stop ends the run with exit code 5.

    A fault that is an exception in a step skips that step in a single process, which changes no weights. Every action becomes
    STOP_UNSAVED if the fault happened while the weights were being changed, or if ten steps in a row were
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
