"""Captions as pipelines with Gemma encode them: after an instruction that makes it elaborate on them.

Shapes: B captions, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smalti.diffusion import Conditioning


def encode_instructed(
    pipeline: object, captions: Sequence[str], device: torch.device, length: int, **more: object
) -> Conditioning:
    """`tokens` (B, L, D) and `mask` (B, L) of the captions, by the pipeline's own `encode_prompt`, which takes `more`.

    With the pipeline's instruction before each caption, but for the empty one: so the pipeline guides away from it.
    """
    empty = torch.tensor([not caption for caption in captions], device=device).view(-1, 1)
    with torch.no_grad():
        tokens, mask, plain, plain_mask = pipeline.encode_prompt(  # type: ignore[attr-defined]
            list(captions),
            do_classifier_free_guidance=bool(empty.any()),
            negative_prompt="",
            device=device,
            max_sequence_length=length,
            **more,
        )
    if plain is not None:
        tokens, mask = torch.where(empty.unsqueeze(-1), plain, tokens), torch.where(empty, plain_mask, mask)
    return {"tokens": tokens, "mask": mask}


def encode_negative(pipeline: object, prompts: Sequence[str | None], device: torch.device, length: int) -> Conditioning:
    """The same of negative prompts, which these pipelines encode without an instruction."""
    with torch.no_grad():
        _, _, tokens, mask = pipeline.encode_prompt(  # type: ignore[attr-defined]
            [""] * len(prompts),
            do_classifier_free_guidance=True,
            negative_prompt=[text or "" for text in prompts],
            device=device,
            max_sequence_length=length,
        )
    return {"tokens": tokens, "mask": mask}
