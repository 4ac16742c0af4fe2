"""Bria 3.2 (Bria AI 2025): rectified flow on packed latents as Flux.1, with tokens of T5 and no pooled vector.

What is padding of a caption is zeros, which the model attends to: there is no mask. Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention, split_sequences
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class Bria(TransformerFamily):
    name = "bria"
    pipeline = "BriaPipeline"
    blocks = ("BriaTransformerBlock", "BriaSingleTransformerBlock")
    targets = JOINT_ATTENTION
    tokens = PACKED
    patch = 2
    time = "1000t"
    gives_sigmas = True
    captions = {"tokens": TokenRows(width="joint_attention_dim")}
    max_length = 128
    encode_arguments = {"do_classifier_free_guidance": False}
    splits = split_sequences(ids=0)
    attention = joint_attention("transformer_blocks", "single_transformer_blocks")

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        # As in the pipeline: it is that of Stable Diffusion XL.
        self.vae_in_fp32 = components.config("vae").get("shift_factor") is None
        if options.validation_noise_scheduler not in (None, "euler"):
            why = "shifts noise levels by size for FlowMatchEulerDiscreteScheduler alone"
            raise UserError(
                f"validation_noise_scheduler={options.validation_noise_scheduler}: {self.pipeline} {why}",
                fix="--validation_noise_scheduler=euler",
            )

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """The empty caption is zeros, as the pipeline has it for no negative prompt."""
        given = torch.tensor([caption != "" for caption in captions], device=self.device)
        return {"tokens": super().encode_captions(captions)["tokens"] * given[:, None, None]}

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        text = torch.zeros(conditioning["tokens"].shape[1], 3, device=noisy.device)
        return {"txt_ids": text, "img_ids": positions(noisy)}

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        """The pipeline's constructor needs an autoencoder, and its encoding the type of a model: that of the encoder here.

        Constructed with an autoencoder, it takes it to fp32 whatever `--vae_dtype` says.
        """
        if not encodes:
            pipeline = super().assemble(cls, parts, encodes=encodes)
            pipeline.vae.to(self._dtype("latents"))
            return pipeline
        encoder = cast(Any, parts["text_encoder"])
        for block in encoder.encoder.block:  # in bf16 the authors keep these in fp32
            block.layer[-1].DenseReluDense.wo.float()
        pipeline = cast(Any, object.__new__(cls))
        pipeline.register_modules(**{**dict.fromkeys(pipeline._optional_components), **parts, self.part: encoder})
        return pipeline
