"""ERNIE-Image (Baidu 2026): rectified flow, image tokens and then those of Ministral 3 in one sequence of blocks.

Shapes: B batch, latents (B, C, h, w), L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from smalti.diffusion import Conditioning
from smalti.models import SampleRequest
from smalti_diffusers.families.autoencoders import PatchAutoencoder
from smalti_diffusers.families.captions import Mask, TokenRows
from smalti_diffusers.families.padding import as_long_as_the_longest, beside, pad_captions, unpadded
from smalti_diffusers.families.transformer import TransformerFamily

_MULTIPLE = 64
"""Texts that are trained have multiples of this many tokens, so that few lengths occur, whatever the data."""


class ErnieAutoencoder(PatchAutoencoder):
    """That of Flux.2; the pipeline has its own number in place of the configuration's."""

    epsilon = 1e-5


class Ernie(TransformerFamily):
    name = "ernie"
    pipeline = "ErnieImagePipeline"
    blocks = ("ErnieImageSharedAdaLNBlock",)
    autoencoder = ErnieAutoencoder
    patch = 1
    time = "1000t"
    gives_sigmas = True
    unused_parts = ("pe", "pe_tokenizer")  # which rewrite prompts
    captions = {
        "tokens": TokenRows(model="text_bth", width="text_in_dim"),
        "mask": Mask(returned=None, model=None, dtype=torch.bool),
    }
    max_length = 512
    host_conditioning = ("mask",)

    def build_base(self) -> nn.Module:
        model = super().build_base()
        _embed_on_meta(cast(nn.Module, model.pos_embed))
        return model

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """The pipeline encodes prompts one by one, and cuts them where its tokenizer says."""
        encoder = cast(Any, self.encoder)
        encoder.tokenizer.model_max_length = self.text_length
        rows = encoder.encode_prompt(list(captions), device=self.device)
        return pad_captions(rows, None, self.text_length, torch.bool)

    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """The model makes the mask itself, of the lengths."""
        tokens, _ = as_long_as_the_longest(conditioning["tokens"], conditioning["mask"], multiple=_MULTIPLE)
        given = super().inputs(noisy, timesteps, {"tokens": tokens})
        return given | {"text_lens": beside(conditioning["mask"], noisy.device).sum(dim=1)}

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        """Its own way to pad waits for the device, and needs values where memory is counted."""
        pipeline = super().assemble(cls, parts, encodes=encodes)
        pipeline._pad_text = _padded
        return pipeline

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        return {"prompt_embeds": unpadded(conditioning), "negative_prompt_embeds": unpadded(unconditional)}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        return {}


def _padded(
    text_hiddens: Sequence[Tensor], device: torch.device, dtype: torch.dtype, text_in_dim: int
) -> tuple[Tensor, Tensor]:
    """(B, L, text_in_dim) with zeros behind each of the texts (L, text_in_dim), and their lengths (B,)."""
    lengths = [len(row) for row in text_hiddens]
    rows = [pad(row.to(device, dtype), (0, 0, 0, max(lengths) - len(row))) for row in text_hiddens]
    return torch.stack(rows), torch.tensor(lengths, device=device)


def _embed_on_meta(embedding: nn.Module) -> None:
    """Make positions without values embed to angles without values: diffusers switches autocast off, which meta has not."""
    embed, width = embedding.forward, sum(cast(Any, embedding).axes_dim)

    def forward(ids: Tensor) -> Tensor:
        return ids.new_empty(*ids.shape[:2], 1, width) if ids.is_meta else cast(Tensor, embed(ids))

    embedding.forward = forward
