"""Qwen-Image 2.1 (Qwen 2026), text to image: rectified flow on latents of 16 pixels each, in one sequence after the text.

Shapes: B batch, latents (B, C, h, w), L text tokens, N = h w image tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.autoencoders import AlphaAutoencoder, over_white
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.padding import as_long_as_the_longest, pad_captions
from smalti_diffusers.families.text_first import text_first
from smalti_diffusers.families.text_processor import NoTexts, TextProcessor
from smalti_diffusers.families.tokens import FLAT
from smalti_diffusers.families.transformer import TransformerFamily


class QwenImage21(TransformerFamily):
    name = "qwen_image21"
    pipeline = "QwenImage21Pipeline"
    blocks = ("QwenImage21TransformerBlock",)
    text_parts = ("text_encoder", "processor")
    autoencoder = AlphaAutoencoder
    tokens = FLAT
    patch = 2  # the model has a place in its mask for each square of four tokens
    gives_sigmas = True
    captions = {
        "tokens": TokenRows(width="context_in_dim"),
        "mask": Mask(model=None, pipeline="prompt_embeds_mask"),
    }
    max_length = 512  # with what the template has behind a prompt
    host_conditioning = ("mask",)

    def image_tokens(self, width: int, height: int) -> int:
        return math.prod(self.latent_shape(width, height)[1:])

    def build_base(self) -> nn.Module:
        model = super().build_base()
        text_first(model)
        return model

    def _load(self, part: str) -> object:
        return TextProcessor(self.components.folder / part) if part == "processor" else super()._load(part)

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        return super().assemble(cls, parts if encodes else {**parts, "processor": NoTexts()}, encodes=encodes)

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Raises UserError for a caption that is too long: the pipeline cuts none."""
        with torch.no_grad():
            tokens, mask, _ = cast(Any, self.encoder).encode_prompt(list(captions), device=self.device)
        if tokens.shape[1] > self.text_length:
            longest = 0 if mask is None else int(mask.sum(dim=1).argmax())
            raise UserError(
                f"the caption {captions[longest][:40]!r} is longer than --tokenizer_max_length={self.text_length}:"
                f" it has {tokens.shape[1]} tokens",
                fix="a larger --tokenizer_max_length, or a shorter caption",
            )
        return pad_captions(tokens, mask, self.text_length, torch.int64)

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """Texts without what is padding in every row, as in the pipeline."""
        tokens, mask = as_long_as_the_longest(conditioning["tokens"], conditioning["mask"])
        height, width = noisy.shape[-2:]
        kinds = torch.arange(tokens.shape[1] + height * width // 4, device=noisy.device) >= tokens.shape[1]
        return super().inputs(noisy, timesteps, {"tokens": tokens}) | {
            "encoder_hidden_states_mask": mask,
            "img_shapes": [[(1, height, width)]] * len(noisy),
            "img_mask": kinds.expand(len(noisy), -1),
        }

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        return super().outputs(prediction[:, -math.prod(noisy.shape[-2:]) :], noisy)

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        given: dict[str, object] = {}
        for prefix, each in {"": conditioning, "negative_": unconditional}.items():
            tokens, mask = as_long_as_the_longest(each["tokens"], each["mask"])
            given |= {f"{prefix}prompt_embeds": tokens, f"{prefix}prompt_embeds_mask": mask}
        return given

    def call_pipeline(self, request: SampleRequest, **given: object) -> Tensor:
        """The pipeline has one scale of guidance, under another name, and answers with transparency."""
        return over_white(cast(Any, self.frozen)(**given, true_cfg_scale=request.guidance).images)
