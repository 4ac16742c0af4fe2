"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): rectified flow, two CLIP encoders and T5 in one sequence beside the image.

Shapes: B batch, latents (B, C, h, w), L tokens of CLIP and of T5 one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from smalti import Config, UserError
from smalti.models import Attention, ContextPlan, SeededWeights, Split
from smalti_diffusers.families.captions import PooledRow, TokenRows
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components, PartWeights

CLIP_TOKENS = 77


class StableDiffusion3(TransformerFamily):
    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    blocks = ("JointTransformerBlock",)
    targets = JOINT_ATTENTION
    time = "1000t"
    captions = {"tokens": TokenRows(width="joint_attention_dim", more=CLIP_TOKENS), "pooled": PooledRow(returned=2)}
    max_length = 256  # of T5
    encode_arguments = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    splits = (
        Split(module="pos_embed", tensor=0, stream="image", dim=1),
        Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
    )
    attention = {"transformer_blocks.*.attn": ("image", "text")}

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        super().__init__(components, options, config)
        if not components.has("text_encoder_3"):
            raise UserError(
                f"{components.folder} has no text_encoder_3, the T5 encoder",
                fix="name a pipeline with all three text encoders",
            )

    def build_base(self) -> nn.Module:
        """With its table of positions on the meta device, too.

        The weights have that table, and 3.5 Medium would need 4 GB for a moment on every rank to compute it.
        """
        with torch.device("meta"):
            return super().build_base()

    def base_weights(self, seed: int) -> SeededWeights | PartWeights:
        return SeededWeights(super().build_base, seed) if self.options.init_from_config else super().base_weights(seed)

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """3.5 Medium has blocks with a second attention."""
        plan = super().context_plan(model)
        if plan is None or not self.model_config.get("dual_attention_layers"):
            return plan
        second = Attention(module="transformer_blocks.*.attn2", streams=("image",))
        return replace(plan, attention=(*plan.attention, second))
