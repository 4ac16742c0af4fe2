"""When things happen: how the learning rate changes, and at which steps the run validates, evaluates and saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from smalti.config import CheckpointOptions, Config, OptimizerOptions, ValidationOptions
from smalti.data import PreparedData
from smalti.types import RunState


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """At which optimizer steps the loop validates, evaluates and saves; 0 means only at the end, which the loop does anyway.

    `epoch_of` returns the epoch of a data position; None without held-out images. `samples_images`: there are prompts.
    """

    validation_interval: int
    checkpoint_interval: int
    samples_images: bool
    evaluation_interval: int = 0
    evaluation_epochs: int = 0
    epoch_of: Callable[[int], int] | None = None

    @classmethod
    def of(cls, config: Config, data: PreparedData) -> Cadence:
        validation = config[ValidationOptions]
        return cls(
            validation_interval=validation.validation_step_interval,
            checkpoint_interval=config[CheckpointOptions].checkpoint_step_interval,
            samples_images=validation.samples_images,
            evaluation_interval=validation.eval_steps_interval,
            evaluation_epochs=validation.eval_epoch_interval,
            epoch_of=None if data.held_out is None else data.order.epoch_of,
        )

    def should_validate(self, state: RunState) -> bool:
        if not self.samples_images:
            return False
        return state.validation_requested or _due(state, self.validation_interval) or state.step == state.max_steps

    def should_evaluate(self, state: RunState) -> bool:
        if self.epoch_of is None:
            return False
        if _due(state, self.evaluation_interval) or state.step == state.max_steps:
            return True
        epochs = self.evaluation_epochs
        return epochs > 0 and not state.skipped and self.epoch_of(state.position) // epochs > state.epoch // epochs

    def should_save(self, state: RunState) -> bool:
        return state.save_requested or _due(state, self.checkpoint_interval)


def _due(state: RunState, interval: int) -> bool:
    return interval > 0 and state.step % interval == 0 and not state.skipped


def learning_rate(options: OptimizerOptions, total: int) -> Callable[[int], float]:
    """The factor on the peak rate as a function of the step alone, so that resuming needs no state.

    Every shape begins with a linear warm-up; `total` is the number of steps of the whole run.
    """
    warmup, end = options.lr_warmup_steps, options.lr_end_ratio
    shape = _SHAPES[options.lr_scheduler]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if options.lr_scheduler == "cosine" and options.lr_cosine_steps is not None:
            done = (step - warmup) / options.lr_cosine_steps
        else:
            done = min(1.0, (step - warmup) / max(1, total - warmup))
        return end + (1 - end) * shape(done, options)

    return factor


def _stable_then_linear(done: float, options: OptimizerOptions) -> float:
    return min(1.0, (1 - done) / options.lr_decay_share)


_SHAPES: dict[str, Callable[[float, OptimizerOptions], float]] = {
    "constant": lambda _done, _options: 1.0,
    "constant_with_warmup": lambda _done, _options: 1.0,
    "linear": lambda done, _options: 1 - done,
    "cosine": lambda done, _options: 0.5 * (1 + math.cos(math.pi * done)),
    "polynomial": lambda done, options: float((1 - done) ** options.lr_power),
    "warmup_stable_decay": _stable_then_linear,
}


def build_scheduler(optimizer: torch.optim.Optimizer, options: OptimizerOptions, total: int, step: int) -> LambdaLR:
    """torch's scheduler over `learning_rate`, standing at `step`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = options.learning_rate
    return LambdaLR(optimizer, learning_rate(options, total), last_epoch=step - 1)
