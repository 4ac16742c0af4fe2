"""The memory that the backward pass of one block takes, counted on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from smalti_plan.rehearsal.ledger import Ledger

_OUTSIDE = ("parameters", "frozen", "gradients")


@dataclass(frozen=True, kw_only=True)
class BackwardMemory:
    """Bytes without weights, inputs and the gradients of weights.

    `extra` is what the backward pass needs at its peak beyond what the forward pass has kept, `again` what both need together.
    """

    extra: int
    again: int


def backward_memory(
    module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], computing: Callable[[], AbstractContextManager[object]]
) -> BackwardMemory:
    """Of a block with these inputs; `computing` gives the contexts of a forward pass. Leaves gradients nowhere."""
    arguments, named = tree_map_only(Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), given)
    ledger = Ledger("cpu", 1)
    parameters = [each for each in module.parameters() if each.requires_grad]
    hooks = [
        each.register_post_accumulate_grad_hook(lambda one: ledger.mark([one.grad], "gradients"))  # type: ignore[no-untyped-call]
        for each in parameters
    ]
    try:
        with ledger:
            ledger.mark((*module.parameters(), *module.buffers()), "parameters")
            ledger.mark((each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)), "frozen")
            ledger.begin("forward", "activations")
            with torch.enable_grad(), computing():
                made = module(*arguments, **named)
            results = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
            kept = _passing(dict(ledger.held))
            ledger.begin("backward", "temporaries")
            torch.autograd.backward(results, [torch.empty_like(each) for each in results])
        peak = _passing(ledger.moments["backward"].device)
    finally:
        for hook in hooks:
            hook.remove()
        for each in parameters:
            each.grad = None
    forward = _passing(ledger.moments["forward"].device)
    return BackwardMemory(extra=max(0, peak - kept), again=max(peak, forward))


def _passing(held: dict[str, int]) -> int:
    return sum(size for kind, size in held.items() if kind not in _OUTSIDE and kind != "host")
