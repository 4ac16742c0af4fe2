"""Cosmos-Predict2 (NVIDIA 2025), text to image: a transformer that takes an image as a video, attending to the tokens of T5.

Its pipeline counts noise as EDM does (Karras et al. 2022): its latents are an image and sigma times the noise. The model gets
them divided by 1 + sigma, at the time sigma / (1 + sigma), and answers with the velocity: it is one of rectified flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from smalti import Config, UserError
from smalti.models import SampleRequest
from smalti_diffusers.families.anima import without_padding
from smalti_diffusers.families.autoencoders import VideoAutoencoder
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.tokens import VIDEO
from smalti_diffusers.families.transformer import TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class Cosmos(TransformerFamily):
    name = "cosmos"
    pipeline = "Cosmos2TextToImagePipeline"
    blocks = ("CosmosTransformerBlock",)
    autoencoder = VideoAutoencoder
    tokens = VIDEO
    patch = 2
    gives_sigmas = True
    unused_parts = ("safety_checker",)
    captions = {"tokens": TokenRows(width="text_embed_dim")}
    max_length = 512
    encode_arguments = {"do_classifier_free_guidance": False}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        self.alignment = 16  # which the pipeline insists on
        if options.validation_noise_scheduler not in (None, "euler"):
            raise UserError(
                f"validation_noise_scheduler={options.validation_noise_scheduler}: {self.pipeline} counts noise as EDM does",
                fix="--validation_noise_scheduler=euler, or leave it out",
            )

    def build_base(self) -> nn.Module:
        model = super().build_base()
        without_padding(model)
        return model

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        return super().assemble(cls, {**parts, "safety_checker": _NotAsked()}, encodes=encodes)

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """The pipeline counts guidance from 0."""
        return {**super().sampling(request), "guidance_scale": request.guidance - 1}

    def call_pipeline(self, request: SampleRequest, **given: object) -> Tensor:
        """The pipeline would show the pixels to its guardrail, in 8 bits."""
        return (self.decode_latents(super().call_pipeline(request, **{**given, "output_type": "latent"})) + 1) / 2


class _NotAsked:
    """In place of NVIDIA's guardrail, a package that the pipeline insists on. Encoded prompts and latents do not reach it."""

    def to(self, device: object) -> None: ...
