"""What a run has written or measured. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
