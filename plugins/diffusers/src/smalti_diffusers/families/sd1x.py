"""Stable Diffusion 1 (Rombach et al. 2022): a U-Net on latents, conditioned on the tokens of one CLIP encoder.

Shapes: B batch, latents (B, C, h, w), L = 77 tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.unet import UNetFamily
from smalti_diffusers.sources.components import Components


class StableDiffusion1(UNetFamily):
    name = "sd1x"
    pipeline = "StableDiffusionPipeline"
    published = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    captions = {"tokens": TokenRows(width="cross_attention_dim")}
    adaptable_encoders = ("text_encoder",)
    unused_parts = ("safety_checker", "feature_extractor", "image_encoder")

    @classmethod
    def build_adaptable(cls, components: Components) -> nn.Module:
        from smalti_diffusers.families.encoding_unet import EncodingUNet

        return cast(nn.Module, EncodingUNet.build(components))

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Where the encoder is trained, the model encodes these token ids."""
        if self.encoders:
            return {"ids": self.token_ids("tokenizer", captions)}
        with torch.no_grad():
            tokens, _ = cast(Any, self.encoder).encode_prompt(list(captions), self.device, 1, False)
        return {"tokens": tokens.float()}

    def embedded(self, model: nn.Module, conditioning: Conditioning) -> Conditioning:
        return {"tokens": model(texts=conditioning)[0].float()} if self.encoders else conditioning

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        if self.encoders:
            return {"ids": torch.zeros(1, 77, dtype=torch.long)}
        return {"tokens": self.captions["tokens"].example(self.model_config, 77)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        texts = {"texts": conditioning} if self.encoders else {"encoder_hidden_states": conditioning["tokens"]}
        return {"sample": noisy, "timestep": timesteps, **texts}
