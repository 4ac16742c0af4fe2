"""Tensors that travel between the ranks of a group, with gradients that travel back. Every rank of the group calls each.

Shapes: C ranks of the group, in the order of ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed these two and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The equally shaped tensors of all ranks: (C, ...). The gradient of each is summed over what all ranks made of it."""
    if tensor.dtype is torch.bool:
        return gather(tensor.to(torch.uint8), group).to(torch.bool)
    gathered: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(C, ...) -> (C, ...): entry r goes to rank r, and what rank r has sent comes in as entry r."""
    exchanged: Tensor = _Exchange.apply(tensor, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Context(Protocol):
    """What torch hands from forward to backward."""

    group: dist.ProcessGroup


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
        _all_gather(gathered, tensor.contiguous(), group=group)
        return gathered.view(group.size(), *tensor.shape)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[1:])
        _reduce_scatter(own, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(tensor, group)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
