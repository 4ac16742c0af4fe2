"""Lumina Image 2.0 (Qin et al. 2025): rectified flow from noise at 0 to the image at 1, Gemma tokens before image tokens.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.gemma import encode_instructed, encode_negative
from smalti_diffusers.families.padding import beside, lengths
from smalti_diffusers.pipeline import PipelineFamily, create

_LENGTHS = "_smalti_lengths"
"""What a mask that `inputs` returns has beside its values: the number of tokens of each caption, which the model asks for."""


class Lumina2(PipelineFamily):
    name = "lumina2"
    pipeline = "Lumina2Pipeline"
    former_names = ("Lumina2Text2ImgPipeline",)
    blocks = ("Lumina2TransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    gives_sigmas = True
    host_conditioning = ("mask",)

    def build_base(self) -> nn.Module:
        model = super().build_base()
        cast(nn.Module, model.rope_embedder).register_forward_pre_hook(_with_lengths)
        return model

    @property
    def text_length(self) -> int:
        """With the tokens of the instruction that the pipeline puts before a prompt."""
        return self.options.tokenizer_max_length or 256

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        return encode_instructed(self.encoder, captions, self.device, self.text_length)

    def encode_negative_prompts(self, prompts: Sequence[str | None]) -> Conditioning:
        return encode_negative(self.encoder, prompts, self.device, self.text_length)

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["cap_feat_dim"])
        length = self.text_length
        return {"tokens": torch.empty(1, length, width_of_text), "mask": torch.ones(1, length, dtype=torch.int64)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        mask = beside(conditioning["mask"], noisy.device)
        setattr(mask, _LENGTHS, lengths(conditioning["mask"]))
        return {
            "hidden_states": noisy,
            "timestep": 1 - timesteps / 1000,
            "encoder_hidden_states": conditioning["tokens"],
            "encoder_attention_mask": mask,
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        """The model predicts the direction of the image; velocity points to the noise."""
        return -prediction

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {
            "prompt_embeds": conditioning["tokens"],
            "prompt_attention_mask": conditioning["mask"],
            "negative_prompt_embeds": unconditional["tokens"],
            "negative_prompt_attention_mask": unconditional["mask"],
        }

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"max_sequence_length": self.text_length}


class _Counted:
    """Stands in for a mask (B, L) where the model counts the tokens of each caption: these."""

    def __init__(self, mask: Tensor) -> None:
        known: Sequence[int] | None = getattr(mask, _LENGTHS, None)
        self.shape = mask.shape
        self.lengths = lengths(mask) if known is None else known

    def sum(self, dim: int) -> _Counted:
        return self

    def tolist(self) -> Sequence[int]:
        return self.lengths


def _with_lengths(embedder: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, _Counted]:
    """Before positions are made: the number of tokens comes with the mask, and tables are on the device once they were used.

    The host would wait for the device to count the ones, and for a copy of each table.
    """
    states, mask = inputs
    tables = cast(list[Tensor], embedder.freqs_cis)
    tables[:] = [table.to(states.device) for table in tables]
    return states, _Counted(mask)


def family(config: Config) -> Lumina2:
    return cast(Lumina2, create(Lumina2, config))
