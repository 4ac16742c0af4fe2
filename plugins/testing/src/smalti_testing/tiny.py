"""The smallest model family that keeps the contract: a few hundred parameters, for tests of whatever trains one.

Its sizes are odd on purpose, so that no number of ranks divides them evenly.

Shapes: B batch, H, W pixels, D width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smalti.diffusion import Conditioning
from smalti.models import ModelFamily

_WORDS = 31
"""Captions are hashed into a table of this many rows."""


class TinyBlock(nn.Module):
    """A residual convolution under a condition (B, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Linear(width, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, pixels: Tensor, condition: Tensor) -> Tensor:
        shifted = pixels + self.shift(condition)[:, :, None, None]
        return pixels + torch.tanh(self.mix(shifted))


class TinyModel(nn.Module):
    """(B, 3, H, W) noisy images, (B,) timesteps and (B,) caption numbers -> (B, 3, H, W)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 1)
        self.words = nn.Embedding(_WORDS, width)
        self.time = nn.Linear(2, width)
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(depth))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: Tensor, timesteps: Tensor, words: Tensor) -> Tensor:
        angle = timesteps[:, None] / 1000
        condition = F.silu(self.time(torch.cat([angle.cos(), angle.sin()], dim=1)) + self.words(words))
        pixels = self.enter(noisy)
        for block in self.blocks:
            pixels = block(pixels, condition)
        out: Tensor = self.leave(pixels)
        return out


class TinyFamily(ModelFamily):
    """A family on pixels that needs nothing but torch."""

    name = "tiny"
    alignment = 2

    def __init__(self, *, width: int = 7, depth: int = 2, frozen: Sequence[str] = ()) -> None:
        """The submodules `frozen` do not train, like all that is around an adapter."""
        self.width = width
        self.depth = depth
        self.frozen = frozen

    def build_model(self) -> TinyModel:
        model = TinyModel(self.width, self.depth)
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return model

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        numbers = [zlib.crc32(caption.encode()) % _WORDS for caption in captions]
        return {"words": torch.tensor(numbers, dtype=torch.int64, device=self.device)}

    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        prediction: Tensor = model(noisy, timesteps, conditioning["words"])
        return prediction
