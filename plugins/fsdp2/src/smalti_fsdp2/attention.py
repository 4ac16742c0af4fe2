"""Attention over all tokens of a group of ranks, each of which holds a part of them.

Two strategies, both exact. "allgather": keys and values of all ranks are gathered, and each rank answers its own queries.
"alltoall": a rank trades its tokens of most heads for all tokens of some heads, and back after attention (Jacobs et al. 2023,
DeepSpeed-Ulysses), so that nobody holds all keys and values; it needs enough heads.

Shapes: B batch, H heads, l tokens of a part, L tokens in all, C ranks, d features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smalti import UserError
from smalti_fsdp2.communication import exchange, gather
from smalti_fsdp2.sequences import Layout


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where attention takes place: the module, what its tokens are, and this rank's place among those that share them."""

    module: str
    layout: Layout
    group: dist.ProcessGroup
    place: int
    strategy: str


def attend(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of parts: (B, H, l, d) -> (B, H, l, d), as if all L tokens were here. *Collective*.

    A mask may speak of this rank's part of the keys or of all of them, of this rank's queries or of all of them.
    """
    _check(scope, query, key, is_causal)
    query, key, value = (_in_autocast(each) for each in (query, key, value))
    own = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    if scope.strategy == "alltoall":
        mask = _for_own_heads(scope, attn_mask, query.shape[-3])
        query, key, value = _at_once(partial(_scatter_heads, scope), query, key, value)
        return _gather_heads(scope, own(query, key, value, attn_mask=mask))
    mask = _for_own_queries(scope, attn_mask)
    key, value = _at_once(partial(_whole, scope, dim=-2), key, value)
    return own(query, key, value, attn_mask=mask)


def _check(scope: Scope, query: Tensor, key: Tensor, is_causal: bool) -> None:
    wanted = scope.layout.part_length
    if is_causal:
        raise UserError(f"{scope.module} has causal attention, which cannot be split", fix="--context_parallel_size=1")
    if (query.shape[-2], key.shape[-2]) != (wanted, wanted):
        raise RuntimeError(
            f"attention in {scope.module} has {query.shape[-2]} queries and {key.shape[-2]} keys, and this rank's part of the "
            f"tokens is {wanted}: the context plan does not fit the model"
        )


def _in_autocast(tensor: Tensor) -> Tensor:
    """As attention will take it anyway: half of it need not travel."""
    kind = tensor.device.type
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _at_once(travel: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What comes of each tensor where it goes; in one message, where all are alike."""
    first, *others = tensors
    if all(each.shape == first.shape and each.dtype == first.dtype for each in others):
        return travel(torch.stack(tensors)).unbind()
    return tuple(travel(each) for each in tensors)


def _whole(scope: Scope, part: Tensor, dim: int) -> Tensor:
    return scope.layout.whole(gather(part, scope.group), dim)


def _scatter_heads(scope: Scope, part: Tensor) -> Tensor:
    """(B, H, l, d), all heads of some tokens -> (B, H / C, L, d), some heads of all tokens."""
    count, heads = scope.layout.count, part.shape[-3]
    if heads % count:
        raise UserError(
            f"the {heads} heads of attention in {scope.module} cannot be divided among {count} ranks",
            fix=f"--context_parallel_comm_strategy=allgather, or a context_parallel_size that divides {heads}",
        )
    by_rank = torch.unflatten(part, -3, (count, heads // count)).movedim(-4, 0)
    return scope.layout.whole(exchange(by_rank, scope.group), -2)


def _gather_heads(scope: Scope, mixed: Tensor) -> Tensor:
    """The way back: (B, H / C, L, d) -> (B, H, l, d)."""
    by_rank = exchange(scope.layout.parts(mixed, -2), scope.group)
    return by_rank.movedim(0, -4).flatten(-4, -3)


# --- masks: (..., queries or 1, keys or 1) --------------------------------------------------------------------------


def _for_own_queries(scope: Scope, mask: Tensor | None) -> Tensor | None:
    """Of all keys, for this rank's queries."""
    if mask is None:
        return None
    mask, layout = _for_all_keys(scope, mask), scope.layout
    if mask.shape[-2] == layout.length:
        return layout.part(mask, -2, scope.place)
    return _fitting(scope, mask, mask.shape[-2] in (1, layout.part_length))


def _for_own_heads(scope: Scope, mask: Tensor | None, heads: int) -> Tensor | None:
    """Of all keys, for all queries, for this rank's share of the `heads`."""
    if mask is None:
        return None
    mask, layout = _for_all_keys(scope, mask), scope.layout
    if mask.shape[-2] == layout.part_length:
        mask = _whole(scope, mask, -2)
    mask = _fitting(scope, mask, mask.shape[-2] in (1, layout.length))
    own = heads // layout.count
    return mask if mask.ndim < 3 or mask.shape[-3] == 1 else mask.narrow(-3, scope.place * own, own)


def _for_all_keys(scope: Scope, mask: Tensor) -> Tensor:
    layout, (queries, keys) = scope.layout, mask.shape[-2:]
    if keys == layout.part_length and not 1 < queries == layout.part_length:
        return _whole(scope, mask, -1)
    return _fitting(scope, mask, keys in (1, layout.length))


def _fitting(scope: Scope, mask: Tensor, fits: bool) -> Tensor:
    if not fits:
        layout = scope.layout
        raise RuntimeError(
            f"the mask of attention in {scope.module} is for {tuple(mask.shape[-2:])} queries and keys; split tokens allow for "
            f"all {layout.length} of them, or for this rank's {layout.part_length} queries or keys, but not both"
        )
    return mask
