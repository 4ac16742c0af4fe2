"""The options that all families of diffusers share. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option

FrozenType = Literal["auto", "fp32", "bf16"]


class DiffusersOptions(Options):
    revision: str | None = option(None, help="Revision of a model on the hub: a branch, a tag or a commit.")
    init_from_config: bool = option(
        False, help="Draw the trained model's first weights at random; only its configuration is read.", level="advanced"
    )
    vae_dtype: FrozenType = option(
        "auto", help="Type in which the autoencoder computes; auto is what the family needs.", level="advanced"
    )
    text_encoder_dtype: FrozenType = option(
        "auto",
        help="Type in which text encoders compute; auto is mixed_precision on an accelerator, fp32 on the CPU.",
        level="advanced",
    )
    tokenizer_max_length: int | None = option(
        None, help="Tokens of a caption, for families with a T5 encoder; the family knows a good value.", level="advanced", ge=1
    )
    flux_guidance_value: float = option(
        1.0, help="Guidance that a distilled Flux is told while it trains.", level="advanced", when="model_family == flux", ge=0
    )
    unet_channels_last: bool | None = option(
        None,
        help="Run convolutions on the channels-last layout, which tensor cores want; on for CUDA devices if not given.",
        level="advanced",
        when="model_family == sdxl",
    )


GROUPS = (OptionGroup(name="diffusers", title="Diffusers families", options=DiffusersOptions),)
