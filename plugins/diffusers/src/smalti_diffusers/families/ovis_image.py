"""Ovis-Image (AIDC-AI 2025): rectified flow on packed latents as Flux.1, with tokens of Qwen3 and no guidance as input.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention, split_sequences


class OvisImage(TransformerFamily):
    name = "ovis_image"
    pipeline = "OvisImagePipeline"
    blocks = ("OvisImageTransformerBlock", "OvisImageSingleTransformerBlock")
    targets = JOINT_ATTENTION
    tokens = PACKED
    patch = 2
    captions = {"tokens": TokenRows(width="joint_attention_dim")}
    max_length = 256  # with what the chat has behind a prompt
    encode_arguments = {"do_classifier_free_guidance": False}
    sample_arguments = {"negative_prompt": None}  # it is "" otherwise, which is refused beside an encoded one
    splits = split_sequences(ids=0)
    attention = joint_attention("transformer_blocks", "single_transformer_blocks")

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        place = torch.arange(conditioning["tokens"].shape[1], device=noisy.device, dtype=torch.float32)
        return {"txt_ids": torch.stack([torch.zeros_like(place), place, place], dim=1), "img_ids": positions(noisy)}
