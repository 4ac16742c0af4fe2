"""Stable Diffusion 1 (Rombach et al. 2022): a U-Net on latents, conditioned on the tokens of one CLIP encoder.

Shapes: B batch, latents (B, C, h, w), L = 77 tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.unet import UNetFamily


class StableDiffusion1(UNetFamily):
    name = "sd1x"
    pipeline = "StableDiffusionPipeline"
    published = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    captions = {"tokens": TokenRows(width="cross_attention_dim")}
    unused_parts = ("safety_checker", "feature_extractor", "image_encoder")

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        with torch.no_grad():
            tokens, _ = cast(Any, self.encoder).encode_prompt(list(captions), self.device, 1, False)
        return {"tokens": tokens.float()}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        return {"tokens": self.captions["tokens"].example(self.model_config, 77)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {"sample": noisy, "timestep": timesteps, "encoder_hidden_states": conditioning["tokens"]}
