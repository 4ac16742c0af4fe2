"""Krea 2 (Krea 2026): rectified flow, text and packed latents in one sequence; the model fuses layers of Qwen3-VL itself.

Shapes: B batch, latents (B, C, h, w), L text tokens, N image tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smalti import Config
from smalti.diffusion import Conditioning, ConstantShift
from smalti.models import SampleRequest
from smalti_diffusers.families.autoencoders import VideoAutoencoder
from smalti_diffusers.families.captions import LayerRows, Mask
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import ATTENTION, TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class Krea2(TransformerFamily):
    name = "krea2"
    pipeline = "Krea2Pipeline"
    blocks = ("Krea2TransformerBlock",)
    # The layers that the authors recommend for runs that are not long, by diffusers' script for it.
    targets = (
        *(*ATTENTION, "to_gate", "ff.up", "ff.down", "img_in", "final_layer.linear", "text_fusion.projector"),
        *("txt_in.linear_1", "txt_in.linear_2", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
    )
    autoencoder = VideoAutoencoder
    tokens = PACKED
    patch = 2
    gives_sigmas = True
    captions = {
        "tokens": LayerRows(width="text_hidden_dim", layers="num_text_layers"),
        "mask": Mask(pipeline="prompt_embeds_mask", dtype=torch.bool),
    }
    max_length = 512  # with what the template has behind a prompt

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if components.settings.get("is_distilled"):
            self.flow_shift = ConstantShift(value=math.exp(1.15))  # the pipeline's own number

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        text = torch.zeros(conditioning["mask"].shape[1], 3, device=noisy.device)
        return {"position_ids": torch.cat([text, positions(noisy)])}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """The pipeline counts guidance from 0, which is none; elsewhere, and for smalti, none is 1."""
        return super().sampling(request) | {"guidance_scale": max(0.0, request.guidance - 1)}
