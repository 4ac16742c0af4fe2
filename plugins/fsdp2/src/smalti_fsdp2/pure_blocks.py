"""Blocks that compute in bf16 throughout. Under autocast norms and sums are in fp32, and what follows casts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps

import torch
from torch import Tensor, nn


def compute_in_bf16(blocks: Iterable[nn.Module], kind: str) -> None:
    """Make blocks, whose parameters are gathered in bf16, compute in it on this kind of device, outside of autocast.

    The block's own `forward` is replaced, below all hooks. What is made of timesteps outside of blocks keeps its precision, as
    do positions, which blocks are given in tuples.
    """
    for block in blocks:
        block.forward = _in_bf16(block.forward, kind)


def _in_bf16(forward: Callable[..., object], kind: str) -> Callable[..., object]:
    @wraps(forward)
    def pure(*arguments: object, **named: object) -> object:
        with torch.autocast(kind, enabled=False):
            return forward(*map(_cast, arguments), **{name: _cast(value) for name, value in named.items()})

    return pure


def _cast(value: object) -> object:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
