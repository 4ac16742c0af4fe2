"""AuraFlow (fal 2024): rectified flow, tokens of Pile-T5 and registers beside the image, most blocks on both as one sequence.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion import Conditioning
from smalti.models import Attention, ContextPlan, Join, SampleRequest, Split
from smalti_diffusers.pipeline import PipelineFamily, create

_BLOCKS = ("joint_transformer_blocks", "single_transformer_blocks")


class AuraFlow(PipelineFamily):
    name = "auraflow"
    pipeline = "AuraFlowPipeline"
    blocks = ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")
    targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    vae_in_fp32 = True  # it is that of Stable Diffusion XL

    @property
    def text_length(self) -> int:
        return self.options.tokenizer_max_length or 256

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """What is padding is zeros, which the model attends to: there is no mask."""
        with torch.no_grad():
            tokens, _, _, _ = self.encoder.encode_prompt(  # type: ignore[attr-defined]
                list(captions),
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=self.text_length,
            )
        return {"tokens": tokens}

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        width_of_text = cast(int, self.components.config(self.part)["joint_attention_dim"])
        return {"tokens": torch.empty(1, self.text_length, width_of_text)}

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        return {"hidden_states": noisy, "timestep": timesteps / 1000, "encoder_hidden_states": conditioning["tokens"]}

    def context_plan(self, model: nn.Module) -> ContextPlan:
        """The text is split where the first block takes it: the model has put its registers before it by then."""
        return ContextPlan(
            heads=cast(int, self.components.config(self.part)["num_attention_heads"]),
            splits=(
                Split(module="pos_embed", tensor=0, stream="image", dim=1),
                Split(module=f"{_BLOCKS[0]}.0", tensor="encoder_hidden_states", stream="text", dim=1),
            ),
            attention=tuple(Attention(module=f"{blocks}.*.attn", streams=("text", "image")) for blocks in _BLOCKS),
            joins=(Join(module="proj_out", stream="image", dim=1),),
        )

    def text_settings(self) -> dict[str, object]:
        return {"length": self.text_length}

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """The masks are asked for and not used: what is padding is zeros already."""
        everything = torch.ones(conditioning["tokens"].shape[:2], dtype=torch.int64, device=self.device)
        return {
            "prompt_embeds": conditioning["tokens"],
            "prompt_attention_mask": everything,
            "negative_prompt_embeds": unconditional["tokens"],
            "negative_prompt_attention_mask": everything,
        }

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {"max_sequence_length": self.text_length}


def family(config: Config) -> AuraFlow:
    return cast(AuraFlow, create(AuraFlow, config))
