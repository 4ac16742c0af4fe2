"""AuraFlow (fal 2024): rectified flow, tokens of Pile-T5 and registers beside the image, most blocks on both as one sequence.

What is padding of a caption is zeros, which the model attends to: there is no mask.
"""

from __future__ import annotations

import torch

from smalti.diffusion import Conditioning
from smalti.models import Split
from smalti_diffusers.families.captions import TokenRows
from smalti_diffusers.families.transformer import JOINT_ATTENTION, TransformerFamily, joint_attention


class AuraFlow(TransformerFamily):
    name = "auraflow"
    pipeline = "AuraFlowPipeline"
    blocks = ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")
    targets = JOINT_ATTENTION
    vae_in_fp32 = True  # it is that of Stable Diffusion XL
    captions = {"tokens": TokenRows(width="joint_attention_dim")}
    max_length = 256
    encode_arguments = {"do_classifier_free_guidance": False}
    splits = (
        Split(module="pos_embed", tensor=0, stream="image", dim=1),
        # Where the first block takes it: the model has put its registers before it by then.
        Split(module="joint_transformer_blocks.0", tensor="encoder_hidden_states", stream="text", dim=1),
    )
    attention = joint_attention("joint_transformer_blocks", "single_transformer_blocks")

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """The pipeline asks for masks and does not use them."""
        everything = torch.ones(conditioning["tokens"].shape[:2], dtype=torch.int64, device=self.device)
        masks = ("prompt_attention_mask", "negative_prompt_attention_mask")
        return {**super().prompts(conditioning, unconditional), **dict.fromkeys(masks, everything)}
