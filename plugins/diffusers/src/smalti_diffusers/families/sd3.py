"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): rectified flow, two CLIP encoders and T5 in one sequence beside the image.

Shapes: B batch, latents (B, C, h, w), L tokens of CLIP and of T5 one after the other, D width of T5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config, UserError
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, SeededWeights, Split
from smalti_diffusers.families.pooled import pooled_prompts
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily, create
from smalti_diffusers.sources.components import Components, PartWeights

CLIP_TOKENS = 77


class StableDiffusion3(PipelineFamily):
    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    blocks = ("JointTransformerBlock",)
    targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

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

    @property
    def text_length(self) -> int:
        """Tokens of T5; those of CLIP are always 77."""
        return self.options.tokenizer_max_length or 256

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        with torch.no_grad():
            tokens, _, pooled, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                prompt=list(captions),
                prompt_2=None,
                prompt_3=None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.text_length,
            )
        return {"tokens": tokens, "pooled": pooled}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        config = self.components.config(self.part)
        tokens = torch.empty(1, CLIP_TOKENS + self.text_length, cast(int, config["joint_attention_dim"]))
        return {"tokens": tokens, "pooled": torch.empty(1, cast(int, config["pooled_projection_dim"]))}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {
            "hidden_states": noisy,
            "timestep": timesteps,
            "encoder_hidden_states": conditioning["tokens"],
            "pooled_projections": conditioning["pooled"],
        }

    def context_plan(self, model: nn.Module) -> ContextPlan:
        config = self.components.config(self.part)
        attention = [Attention(module="transformer_blocks.*.attn", streams=("image", "text"))]
        if config.get("dual_attention_layers"):
            attention.append(Attention(module="transformer_blocks.*.attn2", streams=("image",)))
        return ContextPlan(
            heads=cast(int, config["num_attention_heads"]),
            splits=(
                Split(module="pos_embed", tensor=0, stream="image", dim=1),
                Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
            ),
            attention=tuple(attention),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return pooled_prompts(conditioning, unconditional)

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"max_sequence_length": self.text_length}


def family(config: Config) -> StableDiffusion3:
    return cast(StableDiffusion3, create(StableDiffusion3, config))
