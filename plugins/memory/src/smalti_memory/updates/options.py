"""The options of weights that train. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import Config, Options, option


class UpdateOptions(Options):
    weights_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        help="Type of the weights and gradients in full fine-tuning, also in checkpoints. bf16 needs --mixed_precision=bf16; "
        "optimizer state and EMA stay in fp32.",
        tradeoff="bf16 takes half the memory of weights and gradients; slower optimizer steps",
        level="advanced",
    )
    bf16_update: Literal["stochastic", "kahan"] = option(
        "stochastic",
        help="How steps too small for bf16 are kept: by stochastic rounding, or by Kahan sums. Both "
        "are the same after a resume and on any number of ranks.",
        tradeoff="kahan takes 2 more bytes per weight and has no noise",
        level="advanced",
        when="weights_dtype == bf16",
    )
    release_gradients: bool = option(
        False,
        help="Update each tensor within the backward pass and free its gradient, in one process or under FSDP 2. Needs "
        "--gradient_accumulation_steps=1, and --max_grad_norm=0 or --grad_clip_method=value.",
        tradeoff="gradients of one block in memory instead of all; one that is not finite ends the run",
        level="advanced",
    )
    release_clip_norm: float = option(
        0.0,
        help="Clip the gradient of each tensor to this norm before the update. 0 disables it.",
        level="advanced",
        when="release_gradients",
        ge=0,
    )


def in_pieces(config: Config) -> bool:
    """Whether parameters are not updated all at once."""
    options = config[UpdateOptions]
    return options.release_gradients or options.weights_dtype == "bf16"
