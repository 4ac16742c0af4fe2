"""Flux.1 (Black Forest Labs 2024): rectified flow on packed latents, T5 tokens and image tokens in one sequence.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.captions import PooledRow, TokenRows
from smalti_diffusers.families.tokens import PACKED, positions
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention, split_sequences
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components


class Flux(TransformerFamily):
    name = "flux"
    pipeline = "FluxPipeline"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    # Attention and feed-forward of every block: those of the pipeline's training script in diffusers, and in single blocks,
    # whose two outputs are one layer, the feed-forward too.
    targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp")
    single_targets = ("proj_out",)
    tokens = PACKED
    patch = 2
    guided = True
    captions = {"tokens": TokenRows(width="joint_attention_dim"), "pooled": PooledRow(returned=1)}
    encode_arguments = {"prompt_2": None}
    splits = split_sequences(ids=0)
    attention = joint_attention("transformer_blocks", "single_transformer_blocks")

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        # Schnell was trained on 256, which its T5 tokenizer does not say.
        self.max_length = 512 if self.takes_guidance else 256
        if options.flux_true_cfg_scale == 1:
            self.no_negative_prompt = "Flux is sampled without classifier-free guidance unless --flux_true_cfg_scale is above 1"

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {
            "txt_ids": torch.zeros(conditioning["tokens"].shape[1], 3, device=noisy.device),
            "img_ids": positions(noisy),
        }

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        """A model that is not guidance-distilled does not get `--validation_guidance`."""
        name = "true_cfg_scale" if self.takes_guidance else "guidance"
        return {**super().sampling_settings(request), name: self.options.flux_true_cfg_scale}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """Guidance is an input of the model; away from the empty prompt only if that is asked for."""
        return {**super().sampling(request), "true_cfg_scale": self.options.flux_true_cfg_scale}
