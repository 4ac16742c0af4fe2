"""Padding of captions, of which only values tell where it is.

Shapes: B captions, L tokens of each with its padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from smalti.diffusion import Conditioning
from smalti.parallel import to_device


def pad_captions(tokens: Iterable[Tensor], masks: Iterable[Tensor] | None, length: int, dtype: torch.dtype) -> Conditioning:
    """`tokens` (B, length, D) and `mask` (B, length) of (L, D) and (L,) of each caption, padded with zeros: rows for a cache.

    `masks` None: none of the tokens is padding yet, and masks of this type say so.
    """
    rows = list(tokens)
    known = [torch.ones(len(row), dtype=dtype, device=row.device) for row in rows] if masks is None else list(masks)
    return {
        "tokens": torch.stack([pad(row, (0, 0, 0, length - len(row))) for row in rows]),
        "mask": torch.stack([pad(mask, (0, length - len(mask))) for mask in known]),
    }


def has_values(mask: Tensor) -> bool:
    """False where FLOPs or memory are counted: on the meta device, and of fake tensors."""
    return not (mask.is_meta or isinstance(mask, FakeTensor))


def lengths(mask: Tensor) -> Sequence[int]:
    """How many tokens of each caption are no padding, by a mask (B, L) in host memory; of one elsewhere the host waits for it.

    Without values there is no telling what is padding: nothing.
    """
    if not has_values(mask):
        return [mask.shape[1]] * len(mask)
    return cast(list[int], mask.cpu().numpy().sum(axis=1).tolist())


def as_long_as_the_longest(tokens: Tensor, mask: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Without what is padding in every row, but for what the number of tokens needs to be a `multiple`; and the mask of them.

    With a multiple of 1 as the pipeline returns them. No mask where it would be all ones.
    """
    known = lengths(mask)
    longest = min(-(-max(known) // multiple) * multiple, tokens.shape[1])
    return tokens[:, :longest], None if min(known) == longest else beside(mask, tokens.device)[:, :longest]


def unpadded(conditioning: Conditioning) -> list[Tensor]:
    """`tokens` of each caption (L, D) without its padding, by `mask`."""
    return [row[:length] for row, length in zip(conditioning["tokens"], lengths(conditioning["mask"]), strict=True)]


def beside(mask: Tensor, device: torch.device) -> Tensor:
    """The mask on this device; one in host memory gets there without making the host wait."""
    return mask if mask.device == device or mask.is_meta else to_device(mask, device)
