"""Attention on accelerators that are not there: by the kernels that such a device would choose.

torch asks its CUDA kernels which of them fits; a build without any falls back to plain products of matrices, whose scores take
gigabytes that no GPU needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_plain = F.scaled_dot_product_attention
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256
"""The largest head that FlashAttention computes."""


def install() -> None:
    """For the rest of the process."""
    functional: Any = F
    functional.scaled_dot_product_attention = attend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by FlashAttention or the memory-efficient kernel where these fit."""
    kind = query.device.type
    if kind in ("cpu", "meta") or query.ndim != 4:
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    switches: Any = torch.backends.cuda
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALF and width <= _WIDEST and switches.flash_sdp_enabled():
        scale = width**-0.5 if scale is None else scale
        if missing := -width % 8:
            query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
        made: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return made[..., :width] if missing else made
    if switches.mem_efficient_sdp_enabled():
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        learns = query.requires_grad or key.requires_grad or value.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        found: Tensor = efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]
        return found
    return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores: (B, heads, L, S)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
