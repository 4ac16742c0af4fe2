"""Checks of the optimizers of this package, before the launch. Imports no torch."""

from __future__ import annotations

from smalti import Config, Problem
from smalti.config import OptimizerOptions, TrainingOptions

SCHEDULE_FREE = ("adamw_schedulefree", "prodigy_schedulefree")
_SCHEDULES = ("constant", "constant_with_warmup")


def name_of(config: Config) -> str:
    """The name of the optimizer as it is registered, without that of a plugin."""
    return config[OptimizerOptions].optimizer.rpartition(":")[2].lower().replace("-", "_")


def problems(config: Config) -> list[Problem]:
    """What does not fit a schedule-free optimizer."""
    name, options, found = name_of(config), config[OptimizerOptions], []
    if name not in SCHEDULE_FREE:
        return []

    def refuse(option: str, message: str, fix: str) -> None:
        found.append(Problem(message=message, where=config.source(option), fix=fix, option=option))

    if options.lr_scheduler not in _SCHEDULES:
        why = f"{name} averages the weights instead of lowering the learning rate"
        refuse(
            "lr_scheduler", f"{why}, and lr_scheduler={options.lr_scheduler} lowers it", "--lr_scheduler=constant_with_warmup"
        )
    if config[TrainingOptions].use_ema:
        why = "validates, saves and exports an average of the weights already"
        refuse("use_ema", f"{name} {why}, and use_ema would average them again", "--no_use_ema")
    if options.adam_beta1 == 0:
        why = "gradients are taken at a mix of it and the fast weights, with adam_beta1 as its share"
        refuse("adam_beta1", f"{name} needs the average of the weights: {why}", "--adam_beta1=0.9")
    return found
