"""The toy family: a small diffusion transformer on pixels that needs nothing but torch.

It exists to be trained in minutes on a CPU: for demos, for trying options, and as the model of every end-to-end test. It is
a DiT (Peebles and Xie 2023) whose words are tokens beside the image's patches, and whose time and mean word modulate every
block. Words are hashed into an embedding table, so there is no vocabulary to ship.

Shapes: B batch, H, W pixels, P patch size, N = (H / P) (W / P) patches, L words, D width.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smalti import UserError
from smalti.diffusion import Conditioning, Prediction, Sampler
from smalti.models import Attention, ContextPlan, FolderWeights, Join, ModelFamily, SampleRequest, Split, Weights
from smalti.parallel import to_device

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder

_TIME_FEATURES = 128


@dataclass(frozen=True, kw_only=True)
class ToyShape:
    """The size of the model; the defaults make 5 million parameters."""

    width: int = 192
    depth: int = 6
    heads: int = 6
    patch: int = 4
    max_tokens: int = 16
    vocabulary: int = 4096

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.patch, self.max_tokens) < 1 or self.vocabulary < 2:
            raise UserError(f"a toy model of {self} is not possible", fix="use positive numbers")
        if self.width % self.heads or self.width % 4:
            raise UserError(
                f"toy_width={self.width} does not fit toy_heads={self.heads}",
                fix="use a width that is a multiple of 4 and of the number of heads",
            )


# --- the model ------------------------------------------------------------------------------------------------------


class ToyBlock(nn.Module):
    """Attention and MLP over all tokens, each shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """(B, L + N, D) tokens under a (B, D) condition -> the same shape."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        tokens = torch.addcmul(tokens, gate_a, self._attend(_modulate(tokens, shift_a, scale_a)))
        hidden = F.gelu(self.mlp_in(_modulate(tokens, shift_m, scale_m)))
        return torch.addcmul(tokens, gate_m, self.mlp_out(hidden))

    def _attend(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        parts = self.attention_in(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = _attention(query, key, value)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class ToyTransformer(nn.Module):
    """Predicts something shaped like the image from a noisy image, a timestep and hashed words."""

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.gradient_checkpointing = False
        self.patch_in = nn.Linear(3 * shape.patch**2, width)
        self.words = nn.Embedding(shape.vocabulary, width)
        self.time_in = nn.Linear(2 * _TIME_FEATURES, width)
        self.time_out = nn.Linear(width, width)
        self.blocks = nn.ModuleList(ToyBlock(width, shape.heads) for _ in range(shape.depth))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, 3 * shape.patch**2)
        self._initialise()

    def _initialise(self) -> None:
        """Zero gates: at the start every block passes its input on, and the output is zero.

        Words start at unit size; from small ones the model takes much longer to see that the prompt matters.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.words.weight)
        for block in self.blocks:
            assert isinstance(block, ToyBlock)
            nn.init.zeros_(block.modulation.weight)
        nn.init.zeros_(self.final_modulation.weight)
        nn.init.zeros_(self.patch_out.weight)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.gradient_checkpointing = True

    def forward(self, noisy: Tensor, timesteps: Tensor, words: Tensor) -> Tensor:
        """(B, 3, H, W) noisy images, (B,) timesteps in [0, 1000], (B, L) word numbers (0: none) -> (B, 3, H, W)."""
        patch = self.shape.patch
        rows, columns = noisy.shape[-2] // patch, noisy.shape[-1] // patch
        grid = F.pixel_unshuffle(noisy, patch).flatten(2).transpose(1, 2)
        images = self.patch_in(grid) + _grid_positions(rows, columns, self.shape.width, noisy.device)
        embedded = self.words(words)
        texts = embedded + _waves(torch.arange(words.shape[1], device=words.device), self.shape.width)
        condition = F.silu(self._time(timesteps) + _mean_word(embedded, words))

        tokens = torch.cat([texts, images], dim=1)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, condition, use_reentrant=False)
            else:
                tokens = block(tokens, condition)

        shift, scale = self.final_modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        patches = self.patch_out(_modulate(tokens[:, words.shape[1] :], shift, scale))
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (rows, columns)), patch)

    def _time(self, timesteps: Tensor) -> Tensor:
        waves: Tensor = self.time_out(F.silu(self.time_in(_waves(timesteps, 2 * _TIME_FEATURES))))
        return waves


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value)
    # On the CPU the bf16 kernel's backward takes several times as long as that of the fp32 one.
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(query.float(), key.float(), value.float()).to(query.dtype)


def _modulate(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(tokens, tokens.shape[-1:]), 1 + scale)


def _mean_word(embedded: Tensor, words: Tensor) -> Tensor:
    """(B, D): the mean over real words; without any, zero."""
    real = (words > 0).unsqueeze(-1).to(embedded.dtype)
    # sqrt: a mean of many small independent vectors would shrink with their number.
    return (embedded * real).sum(1) / real.sum(1).clamp(min=1).sqrt()


def _waves(positions: Tensor, width: int) -> Tensor:
    """(..., width) cosines and sines of positions at geometric wavelengths from 2 pi to 20000 pi (Vaswani et al. 2017)."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) / half * torch.arange(half, device=positions.device))
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _grid_positions(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """(N, D) positions of patches, half for the row and half for the column, counted from the centre of the image.

    Computed for the size at hand, so that every aspect ratio works and there is no table to shard.
    """
    down = _waves(torch.arange(rows, device=device) - (rows - 1) / 2, width // 2)
    across = _waves(torch.arange(columns, device=device) - (columns - 1) / 2, width // 2)
    both = [down.unsqueeze(1).expand(-1, columns, -1), across.unsqueeze(0).expand(rows, -1, -1)]
    return torch.cat(both, dim=-1).flatten(0, 1)


# --- the family -----------------------------------------------------------------------------------------------------


def hash_words(caption: str, *, count: int, vocabulary: int) -> list[int]:
    """The caption's first `count` words as numbers in 1..vocabulary - 1, padded with 0; the same in every process.

    A word is a run of letters and digits, in any case. Two words may share a number (one pair in `vocabulary`).
    """
    words = re.findall(r"\w+", caption.lower())[:count]
    numbers = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in words]
    return numbers + [0] * (count - len(numbers))


class ToyFamily(ModelFamily):
    """The family around `ToyTransformer`. Latents are the pixels themselves.

    `prediction` is what the model is trained for, by default the image itself by rectified flow. `sample_shift` is the
    timestep shift in sampling. `start` is a folder or file of safetensors with the first weights; None is random weights.
    """

    name = "toy"

    def __init__(
        self,
        shape: ToyShape | None = None,
        *,
        prediction: Prediction = "sample",
        sample_shift: float = 1.0,
        start: Path | None = None,
    ) -> None:
        self.shape = shape or ToyShape()
        self.start = start
        self.prediction = prediction
        self.alignment = self.shape.patch
        self.sample_shift = sample_shift

    def build_model(self) -> ToyTransformer:
        return ToyTransformer(self.shape)

    def weights(self, seed: int) -> Weights:
        return super().weights(seed) if self.start is None else FolderWeights(self.start)

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        size, vocabulary = self.shape.max_tokens, self.shape.vocabulary
        rows = [hash_words(caption, count=size, vocabulary=vocabulary) for caption in captions]
        return {"words": to_device(torch.tensor(rows, dtype=torch.int64), self.device).view(len(rows), size)}

    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        prediction: Tensor = model(noisy, timesteps, conditioning["words"])
        return prediction

    def build_sampler(self, request: SampleRequest) -> Sampler:
        return replace(super().build_sampler(request), shift=self.sample_shift)

    def block_classes(self) -> tuple[str, ...]:
        return (ToyBlock.__name__,)

    def context_plan(self, model: nn.Module) -> ContextPlan:
        """Words and patches are one sequence from the first block to the last."""
        return ContextPlan(
            heads=self.shape.heads,
            splits=(Split(module="blocks.0", tensor="tokens", stream="tokens", dim=1),),
            attention=(Attention(module="blocks.*", streams=("tokens",)),),
            joins=(Join(module=f"blocks.{self.shape.depth - 1}", stream="tokens", dim=1),),
        )

    def export(self, folder: ExportFolder) -> None:
        """Plain safetensors, from which another run can start, and the shape of the model."""
        folder.write_model("", {"_class_name": ToyTransformer.__name__, "prediction": self.prediction, **asdict(self.shape)})
