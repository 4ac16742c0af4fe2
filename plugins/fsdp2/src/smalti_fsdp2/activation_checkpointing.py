"""Activation checkpointing: the activations of a block are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from smalti import Block

_EXPENSIVE = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective recomputation keeps, because computing it again costs most."""


def recompute(model: nn.Module, blocks: Sequence[Block], *, mode: str, every: int) -> None:
    """Make every n-th block recompute: all of it ("full"), or all but matrix products and attention ("selective").

    The block's own `forward` is replaced, below all hooks: gathering parameters is not repeated, and names stay.
    """
    for block in blocks[::every]:
        module = model.get_submodule(block.path)
        module.forward = _recomputing(module.forward, selective=mode == "selective")


def _recomputing(forward: Callable[..., Tensor], *, selective: bool) -> Callable[..., Tensor]:
    computed_twice = partial(checkpoint, use_reentrant=False)
    if selective:  # torch.compile refuses any context_fn that is given, the one that does nothing too
        computed_twice = partial(computed_twice, context_fn=partial(create_selective_checkpoint_contexts, _keep))

    @wraps(forward)
    def again(*arguments: object, **named: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        result: Tensor = computed_twice(partial(forward, **named), *arguments)
        return result

    return again


def _keep(context: object, operation: object, *arguments: object, **named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
