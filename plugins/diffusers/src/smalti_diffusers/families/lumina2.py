"""Lumina Image 2.0 (Qin et al. 2025): rectified flow from noise at 0 to the image at 1, Gemma tokens before image tokens.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.gemma import GemmaFamily
from smalti_diffusers.families.padding import beside, lengths

_LENGTHS = "_smalti_lengths"
"""What a mask that the model is given has beside its values: the number of tokens of each caption, which the model asks for."""


class Lumina2(GemmaFamily):
    name = "lumina2"
    pipeline = "Lumina2Pipeline"
    former_names = ("Lumina2Text2ImgPipeline",)
    blocks = ("Lumina2TransformerBlock",)
    time = "1-t"
    sign = -1
    gives_sigmas = True
    captions = {"tokens": TokenRows(width="cap_feat_dim"), "mask": Mask()}
    max_length = 256  # with the tokens of the instruction that the pipeline puts before a prompt
    host_conditioning = ("mask",)

    def build_base(self) -> nn.Module:
        model = super().build_base()
        cast(nn.Module, model.rope_embedder).register_forward_pre_hook(_with_lengths)
        return model

    def more_inputs(self, noisy: Tensor, conditioning: Conditioning) -> dict[str, object]:
        mask = beside(conditioning["mask"], noisy.device)
        setattr(mask, _LENGTHS, lengths(conditioning["mask"]))
        return {"encoder_attention_mask": mask}


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
