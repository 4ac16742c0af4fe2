"""The options that all families of diffusers share. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option
from smalti.options import Names

EmptyPrompt = Literal["auto", "zeros", "encoded"]
FrozenType = Literal["auto", "fp32", "bf16"]
Precision = Literal["no_change", "int8-torchao", "fp8-torchao", "nf4-torchao"]


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
        None, help="Tokens of a caption, where the family lets one choose; it knows a good value.", level="advanced", ge=1
    )
    sdxl_empty_prompt: EmptyPrompt = option(
        "auto",
        help="Embeddings of dropped captions and of the negative prompt of validation images: zeros, or the encoded empty one; "
        "auto is what the pipeline's force_zeros_for_empty_prompt says.",
        level="advanced",
        when="model_family == sdxl",
    )
    flux_guidance_value: float = option(
        1.0, help="Guidance that a distilled Flux (1 or 2, dev) is told while it trains.", level="advanced", ge=0
    )
    flux_true_cfg_scale: float = option(
        1.0,
        help="Strength of guidance away from the empty prompt in validation pictures of Flux; 1 switches it off.",
        level="advanced",
        when="model_family == flux",
        trade="above 1 two passes for each step; for models that were trained with caption dropout",
        ge=1,
    )


class LoraOptions(Options):
    lora_rank: int = option(16, help="Rank of the adapter's matrices.", when="model_type == lora", ge=1)
    lora_alpha: float | None = option(
        None, help="The adapter is added with the weight alpha / rank; without a value, 1.", when="model_type == lora", gt=0
    )
    lora_dropout: float = option(
        0.0, help="Share of an adapter's inputs that are left out in training.", when="model_type == lora", ge=0, lt=1
    )
    lora_targets: Names = option(
        (), help="Ends of the names of the layers that get an adapter; the family knows good ones.", when="model_type == lora"
    )
    lora_init: Literal["kaiming", "gaussian"] = option(
        "kaiming",
        help="How the first of the two matrices is drawn; the second is zero.",
        level="advanced",
        when="model_type == lora",
        aliases=["lora_init_type"],
    )
    lora_base_dtype: FrozenType = option(
        "auto",
        help="Type in which the frozen weights are kept; auto is the type in which the run computes.",
        level="advanced",
        when="model_type == lora",
        trade="bf16: half the memory of fp32",
    )
    base_model_precision: Precision = option(
        "no_change",
        help="Keep the frozen weights of the blocks' linear layers quantised; the rest as lora_base_dtype says.",
        when="model_type == lora",
        trade="8 bits: half the memory of bf16, nf4: a quarter; restored for each product, which takes time",
    )


GROUPS = (
    OptionGroup(name="diffusers", title="Diffusers families", options=DiffusersOptions),
    OptionGroup(name="lora", title="LoRA", options=LoraOptions),
)
