"""Checks of how weights are updated, before the launch. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from smalti import Config, Problem
from smalti.config import LaunchOptions, ModelOptions, OptimizerOptions, TrainingOptions
from smalti.parallel import in_bf16
from smalti_memory.updates.options import UpdateOptions, in_pieces

TOGETHER = ("muon", "prodigy", "adamw_schedulefree", "prodigy_schedulefree")
"""Optimizers that have to see all parameters of a step at once. Others that do are found out in the first step."""


def problems(config: Config) -> list[Problem]:
    """All complaints at once."""
    return [*_of_pieces(config), *_of_release(config), *_of_bf16(config)] if in_pieces(config) else []


def _of_pieces(config: Config) -> Iterator[Problem]:
    """What neither goes with. The options of other packages may not be there."""
    name = "release_gradients" if config[UpdateOptions].release_gradients else "weights_dtype"
    where, off = config.source(name), "--no_release_gradients" if name == "release_gradients" else "--weights_dtype=fp32"
    if _value(config, "deepspeed_config") is not None:
        message = f"{name} does not go with DeepSpeed, which keeps fp32 weights and steps them by itself"
        yield Problem(message=message, where=where, fix=f"--fsdp_enable instead of deepspeed_config, or {off}")
    if _value(config, "fsdp_enable") and _value(config, "fsdp_version") == 1:
        message = f"{name} does not go with FSDP 1, where a rank has flat slices of parameters"
        yield Problem(message=message, where=where, fix=f"--fsdp_version=2, or {off}")
    optimizer = config[OptimizerOptions].optimizer.rpartition(":")[2].lower().replace("-", "_")
    if optimizer in TOGETHER:
        message = f"{name} updates parameters one after the other, and the optimizer {optimizer} needs all of them at once"
        yield Problem(message=message, where=where, fix=f"--optimizer=adamw or adafactor, or {off}")


def _of_release(config: Config) -> Iterator[Problem]:
    training, where = config[TrainingOptions], config.source("release_gradients")
    if not config[UpdateOptions].release_gradients:
        return
    if training.gradient_accumulation_steps > 1:
        message = "release_gradients leaves no gradients to add those of the next micro-batch to"
        fix = "--gradient_accumulation_steps=1 with a larger --train_batch_size, or --no_release_gradients"
        yield Problem(message=message, where=where, fix=fix)
    if training.max_grad_norm and training.grad_clip_method == "norm":
        message = "release_gradients updates weights before the norm of all gradients is known, and max_grad_norm limits it"
        fix = "--max_grad_norm=0, where --release_clip_norm limits the norm of each tensor; or --grad_clip_method=value"
        yield Problem(message=message, where=where, fix=fix)
    sharded = _value(config, "fsdp_enable") or _value(config, "context_parallel_size") not in (None, 1)
    if config[LaunchOptions].num_processes > 1 and not sharded:
        message = "release_gradients frees nothing with DDP, which keeps the gradients of all parameters in its buckets"
        yield Problem(message=message, where=where, fix="--fsdp_enable, --num_processes=1, or --no_release_gradients")


def _of_bf16(config: Config) -> Iterator[Problem]:
    if config[UpdateOptions].weights_dtype != "bf16":
        return
    where = config.source("weights_dtype")
    if config[ModelOptions].model_type != "full":
        message = "weights_dtype is for runs in which all weights train; the weights of an adapter stay in fp32"
        yield Problem(message=message, where=where, fix="--weights_dtype=fp32; the frozen weights have options of their own")
    if not in_bf16(config):
        message = "weights in bf16 are computed with in bf16, and this run computes in fp32"
        yield Problem(message=message, where=where, fix="--mixed_precision=bf16, or --weights_dtype=fp32")


def _value(config: Config, name: str) -> object:
    """None too if no package declares the option."""
    return config.value(name) if name in config.schema.options else None
