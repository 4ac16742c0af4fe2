"""The tensors of which the conditioning of captions consists: where they come from, and by which arguments they are taken.

Shapes: B captions, L tokens of each, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from smalti.diffusion import Conditioning


@dataclass(frozen=True, kw_only=True)
class CaptionTensor(ABC):
    """One of them, with a row for each caption.

    `returned` is its place in what the pipeline's `encode_prompt` returns, None if it does not. `model` is the model's argument
    for it, None if there is none; `pipeline` is the pipeline's, for negative prompts with `negative_` before it.
    """

    returned: int | None = 0
    model: str | None
    pipeline: str

    @abstractmethod
    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        """Of one caption of `length` tokens, for a model with this configuration; values do not matter."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenRows(CaptionTensor):
    """(B, L, D). `width` is the key of D in the model's configuration; `more` tokens are there beside those of the length."""

    model: str | None = "encoder_hidden_states"
    pipeline: str = "prompt_embeds"
    width: str
    more: int = 0

    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        return torch.empty(1, length + self.more, cast(int, config[self.width]))


@dataclass(frozen=True, kw_only=True)
class LayerRows(TokenRows):
    """(B, L, layers, D) of several layers of the encoder. `layers` is the key of their number in the model's configuration."""

    layers: str

    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        return torch.empty(1, length + self.more, cast(int, config[self.layers]), cast(int, config[self.width]))


@dataclass(frozen=True, kw_only=True)
class PooledRow(CaptionTensor):
    """(B, D). `width` is the key of D in the model's configuration."""

    model: str | None = "pooled_projections"
    pipeline: str = "pooled_prompt_embeds"
    width: str = "pooled_projection_dim"

    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        return torch.empty(1, cast(int, config[self.width]))


@dataclass(frozen=True, kw_only=True)
class Mask(CaptionTensor):
    """(B, L), 0 where a token is padding."""

    returned: int | None = 1
    model: str | None = "encoder_attention_mask"
    pipeline: str = "prompt_attention_mask"
    dtype: torch.dtype = torch.int64

    def example(self, config: Mapping[str, object], length: int) -> Tensor:
        return torch.ones(1, length, dtype=self.dtype)


Captions = Mapping[str, CaptionTensor]
"""By the names in the conditioning."""


def prompt_arguments(captions: Captions, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
    """The prompts as arguments of the pipeline; guidance leads away from `unconditional`."""
    given: dict[str, object] = {each.pipeline: conditioning[name] for name, each in captions.items()}
    return given | {f"negative_{each.pipeline}": unconditional[name] for name, each in captions.items()}
