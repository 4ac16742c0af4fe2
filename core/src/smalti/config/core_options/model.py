"""Options of the model."""

from __future__ import annotations

from typing import Literal

from smalti.config.core_options.values import Place
from smalti.config.options import Options, option


class ModelOptions(Options):
    model_family: str | None = option(None, help="Model architecture. `smalti plugins` lists the installed families.")
    model_type: Literal["full", "lora"] = option("full", help="Train all weights (full) or a LoRA adapter (lora).")
    model_flavour: str | None = option(
        None, help="Variant of the family, such as a size or a release.", aliases=["model_flavor"]
    )
    pretrained_model_name_or_path: Place = option(
        None,
        help="Weights to start from: a folder in diffusers layout, a .safetensors file, or a Hugging Face Hub id.",
        aliases=["pretrained_model"],
    )
    gradient_checkpointing: bool = option(
        False, help="Recompute activations in the backward pass.", tradeoff="much less memory, slower steps"
    )
