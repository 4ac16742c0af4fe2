"""Sana (Xie et al. 2024): rectified flow with linear attention on latents 32 times smaller than the image, Gemma as encoder.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.gemma import encode_instructed, encode_negative
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import class_of


class Sana(PipelineFamily):
    name = "sana"
    pipeline = "SanaPipeline"
    blocks = ("SanaTransformerBlock",)
    patch = 1
    targets = ("to_q", "to_k", "to_v", "to_out.0")

    def build_base(self) -> nn.Module:
        model = super().build_base()
        model.register_forward_hook(_in_own_memory)
        return model

    @property
    def text_length(self) -> int:
        return self.options.tokenizer_max_length or 300

    @cached_property
    def instruction(self) -> list[str]:
        """What the pipeline puts before every prompt to make Gemma elaborate on it, unless another one is given."""
        call = class_of("diffusers", self.pipeline).__call__
        return cast(list[str], signature(call).parameters["complex_human_instruction"].default)

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        more = {"complex_human_instruction": self.instruction}
        return encode_instructed(self.encoder, captions, self.device, self.text_length, **more)

    def encode_negative_prompts(self, prompts: Sequence[str | None]) -> Conditioning:
        return encode_negative(self.encoder, prompts, self.device, self.text_length)

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["caption_channels"])
        length = self.text_length
        return {"tokens": torch.empty(1, length, width_of_text), "mask": torch.ones(1, length, dtype=torch.int64)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        scale = cast(float, self.components.config(self.part).get("timestep_scale", 1.0))
        return {
            "hidden_states": noisy,
            "timestep": timesteps * scale,
            "encoder_hidden_states": conditioning["tokens"],
            "encoder_attention_mask": conditioning["mask"],
        }

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length, "instruction": self.instruction}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {
            "negative_prompt": None,
            "prompt_embeds": conditioning["tokens"],
            "prompt_attention_mask": conditioning["mask"],
            "negative_prompt_embeds": unconditional["tokens"],
            "negative_prompt_attention_mask": unconditional["mask"],
        }

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        # Without binning, images have the size asked for.
        return {"max_sequence_length": self.text_length, "use_resolution_binning": False}


def _in_own_memory(model: nn.Module, inputs: object, answer: object) -> object:
    """After the forward pass: its answer, which is a view, copied. FSDP warns of views, which must not be changed in place."""
    return (cast(Tensor, answer[0]).clone(), *answer[1:]) if isinstance(answer, tuple) else answer


def family(config: Config) -> Sana:
    return cast(Sana, create(Sana, config))
