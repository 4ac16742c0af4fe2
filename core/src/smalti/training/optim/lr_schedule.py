"""How the learning rate changes over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from smalti.config import OptimizerOptions


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


_SHAPES: dict[str, Callable[[float, OptimizerOptions], float]] = {
    "constant": lambda _done, _options: 1.0,
    "constant_with_warmup": lambda _done, _options: 1.0,
    "linear": lambda done, _options: 1 - done,
    "cosine": lambda done, _options: 0.5 * (1 + math.cos(math.pi * done)),
    "polynomial": lambda done, options: float((1 - done) ** options.lr_power),
    "warmup_stable_decay": lambda done, options: min(1.0, (1 - done) / options.lr_decay_share),
}


def build_scheduler(optimizer: torch.optim.Optimizer, options: OptimizerOptions, total: int, step: int) -> LambdaLR:
    """torch's scheduler over `learning_rate`, standing at `step`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = group.get("peak_lr", options.learning_rate)
    return LambdaLR(optimizer, learning_rate(options, total), last_epoch=step - 1)
