"""The adapter that the options of a run ask for, and how its checkpoints describe it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smalti import Config
from smalti.config import LaunchOptions, ModelOptions
from smalti.models import without_weights
from smalti.parallel import in_bf16
from smalti_diffusers.lora.adapter import Lora, adapter_scales
from smalti_diffusers.lora.encoders import TARGETS
from smalti_diffusers.lora.quantisation import check_device
from smalti_diffusers.options import LoraOptions, Precision, pattern_values

FROZEN_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The types in which what is frozen can be kept, by their names in options; others are "auto"."""


def chosen_adapter(config: Config | None, targets: tuple[str, ...], idle: tuple[str, ...] = ()) -> Lora | None:
    """None when all weights are trained. `targets` and `idle` are those of the family.

    Raises UserError for a pattern that is none.
    """
    if config is None or config[ModelOptions].model_type != "lora":
        return None
    options = config[LoraOptions]
    ranks = pattern_values("lora_rank_pattern", options.lora_rank_pattern)
    factors = pattern_values("lokr_factor_pattern", options.lokr_factor_pattern)
    return Lora(
        kind=options.lora_kind,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        targets=(*(options.lora_targets or targets), *(TARGETS if options.train_text_encoder else ())),
        excluded=options.lora_exclude,
        idle=idle,
        stabilised=options.use_rslora,
        ranks=tuple((name, int(rank)) for name, rank in ranks),
        alphas=tuple(pattern_values("lora_alpha_pattern", options.lora_alpha_pattern)),
        factor=options.lokr_factor,
        factors=tuple((name, int(factor)) for name, factor in factors),
        full=options.lokr_full and options.lora_kind == "lokr",
        init=options.lora_init,
        rate_ratio=options.loraplus_lr_ratio,
        least=options.tlora_min_rank,
        exponent=options.tlora_alpha,
    )


def description(lora: Lora, build: Callable[[], nn.Module]) -> dict[str, object]:
    """What checkpoints say of the adapter: whatever changes the meaning of its tensors and does not show in their shapes.

    `build` makes the model with the adapter; it is called only where layers can have scales of their own, which are listed.
    """
    said: dict[str, object] = {"kind": lora.kind, "rank": lora.rank, "alpha": float(lora.alpha or lora.rank)}
    if lora.stabilised:
        said["stabilised"] = True
    if lora.least is not None:
        said["timed"] = {"least": lora.least, "exponent": lora.exponent}
    if lora.ranks or lora.alphas:
        with without_weights():
            model = build()
        said["scales"] = adapter_scales(model)
    return said


def base_dtype(config: Config | None) -> torch.dtype:
    """The type of what is frozen beside an adapter."""
    if config is None or config[ModelOptions].model_type != "lora":
        return torch.float32
    return FROZEN_TYPES.get(config[LoraOptions].lora_base_dtype, torch.bfloat16 if in_bf16(config) else torch.float32)


def base_precision(config: Config | None) -> Precision:
    """In what the frozen weights of an adapter's base are kept. Raises UserError where the device cannot."""
    if config is None or config[ModelOptions].model_type != "lora":
        return "no_change"
    precision = config[LoraOptions].base_model_precision
    device = None if config[LaunchOptions].use_cpu else torch.accelerator.current_accelerator(check_available=True)
    check_device(precision, device.type if device is not None else "cpu")
    return precision
