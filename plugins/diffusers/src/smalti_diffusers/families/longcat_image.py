"""LongCat-Image (Meituan 2025): rectified flow on packed latents as Flux.1, with tokens of Qwen2.5-VL and no pooled vector.

Shapes: B batch, latents (B, C, h, w), L text tokens, N image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention, split_sequences

_FIRST = 512
"""Row and column of the first image token, behind those of the longest text; its modality is 1, that of text 0."""


class LongCatImage(TransformerFamily):
    name = "longcat_image"
    pipeline = "LongCatImagePipeline"
    blocks = ("LongCatImageTransformerBlock", "LongCatImageSingleTransformerBlock")
    # Those of the authors' script for a LoRA.
    targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    tokens = PACKED
    patch = 2
    gives_sigmas = True
    unused_parts = ("text_processor",)  # for prompts that the text encoder rewrites
    captions = {"tokens": TokenRows(width="joint_attention_dim")}
    max_length = _FIRST  # without the instruction around a prompt
    splits = split_sequences(ids=0)
    attention = joint_attention("transformer_blocks", "single_transformer_blocks")

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Text in quotation marks is one token for each character, as the pipeline has it."""
        pipeline = cast(Any, self.encoder)
        pipeline.tokenizer_max_length = self.text_length
        with torch.no_grad():
            return {"tokens": pipeline.encode_prompt(list(captions))[0]}

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        image = positions(noisy) + _FIRST
        image[:, 0] = 1
        return {"txt_ids": _text_positions(conditioning["tokens"]), "img_ids": image}

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        """The one that samples takes encoded prompts, for which its own method asks for their texts."""
        pipeline = super().assemble(cls, parts, encodes=encodes)
        if not encodes:
            pipeline.encode_prompt = _encoded
        return pipeline

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"enable_prompt_rewrite": False}


def _encoded(*, prompt_embeds: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return prompt_embeds, _text_positions(prompt_embeds)


def _text_positions(tokens: Tensor) -> Tensor:
    """(L, 3): modality, row and column of every text token."""
    place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
    return torch.stack([torch.zeros_like(place), place, place], dim=1)
