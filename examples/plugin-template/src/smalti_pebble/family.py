"""The model and the family around it. Imported only when `--model_family=pebble` is chosen.

Shapes: B batch, H, W pixels, D width, L words of a caption.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smalti import Config
from smalti.diffusion.objective import Conditioning, Prediction
from smalti.diffusion.sampling import Sampler, seeded_noise
from smalti.models.family import SampleRequest
from smalti.models.weights import SeededWeights
from smalti_pebble import PebbleOptions

VOCABULARY, WORDS = 1024, 8


class PebbleBlock(nn.Module):
    """A residual convolution, scaled and shifted by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.mix = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, pixels: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, dim=1)
        return torch.add(pixels, self.mix(F.silu(pixels * (1 + scale) + shift)))


class PebbleModel(nn.Module):
    """(B, 3, H, W) noisy pictures, (B,) timesteps, (B, L) word numbers -> (B, 3, H, W)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(12, width, 1)
        self.words = nn.Embedding(VOCABULARY, width)
        self.time = nn.Linear(16, width)
        self.blocks = nn.ModuleList(PebbleBlock(width) for _ in range(depth))
        self.leave = nn.Conv2d(width, 12, 1)

    def forward(self, noisy: Tensor, timesteps: Tensor, words: Tensor) -> Tensor:
        angles = timesteps[:, None] / 1000 * 2 ** torch.arange(8, device=noisy.device)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.words(words).mean(1)
        pixels = self.enter(F.pixel_unshuffle(noisy, 2))  # every 2 x 2 pixels become one of 12 channels
        for block in self.blocks:
            pixels = block(pixels, condition)
        return F.pixel_shuffle(self.leave(pixels), 2)


class PebbleFamily:
    """What smalti asks of a family: see `smalti.models.family.ModelFamily`. Latents are the pixels themselves."""

    name = "pebble"
    alignment = 2
    prediction: Prediction = "flow_matching"

    def __init__(self, width: int, depth: int) -> None:
        self.width, self.depth = width, depth
        self.device = "cpu"

    def build_model(self) -> PebbleModel:
        return PebbleModel(self.width, self.depth)

    def weights(self, seed: int) -> SeededWeights:
        return SeededWeights(self.build_model, seed)

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        rows = [[zlib.crc32(w.encode()) % VOCABULARY for w in re.findall(r"\w+", text.lower())] for text in captions]
        padded = [(row + [0] * WORDS)[:WORDS] for row in rows]
        return {"words": torch.tensor(padded, device=self.device)}

    def encode_images(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode_latents(self, latents: Tensor) -> Tensor:
        return latents

    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        prediction: Tensor = model(noisy, timesteps, conditioning["words"])
        return prediction

    def sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        draw = Sampler(objective=request.objective, steps=request.steps, guidance=request.guidance)
        return draw(
            lambda noisy, timesteps, conditioning: self.forward(model, noisy, timesteps, conditioning),
            seeded_noise(request.seeds, (3, request.height, request.width), self.device),
            self.encode_captions(request.prompts),
            self.encode_captions([""] * len(request.prompts)),
        )

    def block_classes(self) -> tuple[str, ...]:
        return ("PebbleBlock",)

    def flops_per_sample(self, width: int, height: int) -> int:
        per_pixel = 2 * 12 * self.width + self.depth * 9 * self.width**2
        return 2 * (width * height // 4 * per_pixel + self.depth * 2 * self.width**2)

    def to(self, device: str) -> None:
        self.device = device


def create(config: Config) -> PebbleFamily:
    """The factory that the plugin names: a family for this configuration."""
    options = config[PebbleOptions]
    return PebbleFamily(options.pebble_width, options.pebble_depth)
