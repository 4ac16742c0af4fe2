"""The model's type, and the optimizer that updates it, on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Block, Config, OptimizerEntry, UserError
from smalti.config import LaunchOptions, ModelOptions, RunOptions, TrainingOptions
from smalti.parallel import Parallel, ProcessGroupParallel
from smalti.training import DdpParallel, build_registered
from smalti_memory.updates.casts import free_casts
from smalti_memory.updates.options import UpdateOptions
from smalti_memory.updates.stepping import ReleasesGradients, Rounding, StepsInPieces, in_pieces as step_in_pieces


def prepare(model: nn.Module, blocks: Sequence[Block], parallel: Parallel, config: Config) -> None:
    """Make the parameters of a model on the meta device bf16, or its passes keep no copies in bf16, as the options say.

    Raises UserError for a strategy that does not step the optimizer that it is given.
    """
    if type(parallel).step is not ProcessGroupParallel.step:
        raise UserError(
            f"{type(parallel).__name__} has steps of its own, which release_gradients and weights_dtype=bf16 cannot change",
            fix="--no_release_gradients --weights_dtype=fp32, or another strategy",
        )
    if config[UpdateOptions].weights_dtype == "bf16":
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
    elif config[UpdateOptions].release_gradients and isinstance(parallel, DdpParallel):  # else there are no copies
        compiled = blocks if config[LaunchOptions].dynamo_backend is not None else ()
        free_casts(model, compiled, recompute=config[ModelOptions].gradient_checkpointing)


def build(groups: list[dict[str, object]], config: Config, registry: Sequence[OptimizerEntry]) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, with the steps that the options ask for.

    Raises UserError if the weights are not of the type that they ask for: `prepare` came too late, or for nothing.
    """
    options, training = config[UpdateOptions], config[TrainingOptions]
    pairs = [pair for group in groups for pair in cast(list[tuple[str, Tensor]], group["params"])]
    if options.weights_dtype == "bf16" and any(parameter.dtype != torch.bfloat16 for _, parameter in pairs):
        raise UserError("the strategy of this run keeps weights in a type of its own", fix="--weights_dtype=fp32")
    rounding: Rounding | None = options.bf16_update if options.weights_dtype == "bf16" else None
    optimizer = build_registered(groups, config, registry)
    if not options.release_gradients:
        stepping: StepsInPieces = step_in_pieces(optimizer, StepsInPieces)
        stepping.start(config[RunOptions].seed, rounding)
        return stepping
    releasing: ReleasesGradients = step_in_pieces(optimizer, ReleasesGradients)
    releasing.start(config[RunOptions].seed, rounding)
    limit = training.max_grad_norm if training.grad_clip_method == "value" else 0.0
    releasing.release(value_limit=limit, norm_limit=options.release_clip_norm)
    return releasing
