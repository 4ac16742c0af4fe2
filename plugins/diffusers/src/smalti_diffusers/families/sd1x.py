"""Stable Diffusion 1 (Rombach et al. 2022): a U-Net on latents, conditioned on the tokens of one CLIP encoder.

Shapes: B batch, latents (B, C, h, w), L = 77 tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.unet import UNetFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class StableDiffusion1(UNetFamily):
    name = "sd1x"
    pipeline = "StableDiffusionPipeline"
    published = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    captions = {"tokens": TokenRows(width="cross_attention_dim")}
    adaptable_encoders = ("text_encoder",)
    unused_parts = ("safety_checker", "feature_extractor", "image_encoder")

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if options.clip_skip and options.clip_skip >= (layers := self._encoder_layers):
            raise UserError(f"clip_skip={options.clip_skip}: the text encoder has {layers} layers", fix="--clip_skip=1")

    @property
    def _encoder_layers(self) -> int:
        return cast(int, self.components.config("text_encoder")["num_hidden_layers"])

    def idle_layers(self) -> tuple[str, ...]:
        """The layers of the encoder that are left out."""
        last = range(self._encoder_layers)[-self.options.clip_skip :] if self.encoders and self.options.clip_skip else ()
        return tuple(f"text_encoder.text_model.encoder.layers.{number}." for number in last)

    def text_settings(self) -> dict[str, object]:
        return {"clip_skip": self.options.clip_skip} if self.options.clip_skip else {}

    def build_base(self) -> nn.Module:
        model = super().build_base()
        if self.encoders:
            cast(Any, model).clip_skip = self.options.clip_skip
        return model

    @classmethod
    def build_adaptable(cls, components: Components) -> nn.Module:
        from smalti_diffusers.families.encoding_unet import EncodingUNet

        return cast(nn.Module, EncodingUNet.build(components))

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Where the encoder is trained, the model encodes these token ids."""
        if self.encoders:
            return {"ids": self.token_ids("tokenizer", captions)}
        pipeline = cast(Any, self.encoder)
        with torch.no_grad():
            if self.options.clip_skip:  # the pipeline calls a layer that newer versions of transformers do not have
                from smalti_diffusers.families.encoding_unet import clip_tokens

                tokens = clip_tokens(pipeline.text_encoder, self.token_ids("tokenizer", captions), self.options.clip_skip)
            else:
                tokens, _ = pipeline.encode_prompt(list(captions), self.device, 1, False)
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
