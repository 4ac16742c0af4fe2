"""Pipelines whose prompts are embeddings of tokens and one pooled embedding: SDXL, Stable Diffusion 3, Flux.1."""

from __future__ import annotations

from smalti.diffusion import Conditioning


def pooled_prompts(conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
    """The prompts as arguments of the pipeline; guidance leads away from `unconditional`."""
    return {
        "prompt_embeds": conditioning["tokens"],
        "pooled_prompt_embeds": conditioning["pooled"],
        "negative_prompt_embeds": unconditional["tokens"],
        "negative_pooled_prompt_embeds": unconditional["pooled"],
    }
