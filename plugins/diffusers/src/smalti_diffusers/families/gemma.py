"""Families that Gemma encodes captions of: after an instruction that makes it elaborate on them.

Shapes: B captions, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from smalti.diffusion import Conditioning
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.transformer import TransformerFamily


class GemmaFamily(TransformerFamily):
    """The pipeline puts its instruction before each caption, but for the empty and negative ones: it guides away from those."""

    captions = {"tokens": TokenRows(width="caption_channels"), "mask": Mask()}

    @property
    def instruction(self) -> Mapping[str, object]:
        """It, if `encode_prompt` wants it as an argument."""
        return {}

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        empty = torch.tensor([not caption for caption in captions], device=self.device).view(-1, 1)
        guided = bool(empty.any())
        tokens, mask, plain, plain_mask = self._encoded(captions, "", guided, **self.instruction)
        if plain is not None:
            tokens, mask = torch.where(empty.unsqueeze(-1), plain, tokens), torch.where(empty, plain_mask, mask)
        return {"tokens": tokens, "mask": mask}

    def encode_negative_prompts(self, prompts: Sequence[str | None]) -> Conditioning:
        _, _, tokens, mask = self._encoded([""] * len(prompts), [text or "" for text in prompts], True)
        return {"tokens": tokens, "mask": mask}

    def _encoded(self, captions: Sequence[str], negative: str | list[str], guided: bool, **more: object) -> Any:
        """`tokens` (B, L, D) and `mask` (B, L), then both of the negative prompts, None if not `guided`."""
        with torch.no_grad():
            return cast(Any, self.encoder).encode_prompt(
                list(captions),
                do_classifier_free_guidance=guided,
                negative_prompt=negative,
                device=self.device,
                max_sequence_length=self.text_length,
                **more,
            )
