"""The forms in which models take latents, and give back their prediction.

Shapes: B batch, latents (B, C, h, w), N = (h / 2) (w / 2) packed tokens of 4 C numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """`pack` makes the model's input of latents; `unpack` makes latents of its output, shaped as its second argument."""

    pack: Callable[[Tensor], object]
    unpack: Callable[[Any, Tensor], Tensor]


def pack(latents: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, N, 4 C): each 2x2 square of latent pixels is one token."""
    batch, channels, height, width = latents.shape
    squares = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, N, 4 C) -> (B, C, h, w)."""
    batch, _, depth = tokens.shape
    squares = tokens.view(batch, height // 2, width // 2, depth // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, depth // 4, height, width)


def positions(latents: Tensor) -> Tensor:
    """(N, 3): nothing, row and column of every packed token."""
    axes = [torch.arange(size // 2, device=latents.device, dtype=torch.float32) for size in latents.shape[-2:]]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat([torch.zeros(len(grid), 1, device=latents.device), grid], dim=1)


PLAIN = Tokens(pack=lambda latents: latents, unpack=lambda prediction, latents: prediction)
"""As they are: the model makes its tokens itself."""
PACKED = Tokens(pack=pack, unpack=lambda prediction, latents: unpack(prediction, *latents.shape[-2:]))
"""(B, N, 4 C)."""
FLAT = Tokens(
    pack=lambda latents: latents.flatten(2).transpose(1, 2),
    unpack=lambda prediction, latents: prediction.transpose(1, 2).reshape(latents.shape),
)
"""(B, h w, C): each latent pixel is one token."""
VIDEO = Tokens(pack=lambda latents: latents.unsqueeze(2), unpack=lambda prediction, latents: prediction.squeeze(2))
"""(B, C, 1, h, w): videos of one frame."""
FRAMES = Tokens(
    pack=lambda latents: list(latents.unsqueeze(2)),
    unpack=lambda prediction, latents: torch.stack(list(prediction)).squeeze(2),
)
"""A list of B videos (C, 1, h, w) of one frame."""
