"""The options of weights that train. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import Config, Options, option


class UpdateOptions(Options):
    weights_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        help="Type in which the weights that train are kept, between steps and in checkpoints, when all weights train. bf16 "
        "needs --mixed_precision=bf16; gradients are in bf16 then, optimizer state and EMA stay in fp32.",
        tradeoff="bf16 takes half the memory of weights and gradients; slower optimizer steps",
        level="advanced",
    )
    bf16_update: Literal["stochastic", "kahan"] = option(
        "stochastic",
        help="How steps that are smaller than the precision of bf16 are kept: rounded up or down by chance, without bias, or "
        "with what rounding took away as optimizer state (Kahan). Both are the same on any number of ranks and after a resume.",
        tradeoff="kahan takes 2 bytes per weight and has no noise",
        level="advanced",
        when="weights_dtype == bf16",
    )
    release_gradients: bool = option(
        False,
        help="Update each tensor in the backward pass as soon as its gradient is there, and free the gradient. On one rank, or "
        "with FSDP 2. Needs --gradient_accumulation_steps=1, and --max_grad_norm=0 or --grad_clip_method=value. A gradient "
        "that is not finite ends the run, which resumes from the last checkpoint.",
        tradeoff="memory for the gradients of one block instead of all; no clipping by the norm of all gradients",
        level="advanced",
    )
    release_clip_norm: float = option(
        0.0,
        help="Clip the gradient of each tensor to this norm before it is released. 0 disables it.",
        level="advanced",
        when="release_gradients",
        ge=0,
    )


def in_pieces(config: Config) -> bool:
    """Whether parameters are not updated all at once."""
    options = config[UpdateOptions]
    return options.release_gradients or options.weights_dtype == "bf16"
