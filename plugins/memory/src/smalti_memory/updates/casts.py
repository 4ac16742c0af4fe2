"""The bf16 copies that autocast makes of fp32 weights, and for how long they stay.

Autocast keeps each copy to the end of the forward pass, and a layer that is not recomputed for the backward pass. Where
gradients are released, these copies would take the most of what is not kept between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smalti import Block

_LEAST = 2**18
"""Numbers in a weight whose copy is worth computing a layer again."""


def free_casts(model: nn.Module, compiled: Sequence[Block], *, recompute: bool) -> None:
    """Make the passes of a model within autocast keep copies of weights for a layer or a recomputed block only.

    With `recompute`, layers are computed again in the backward pass if nothing around them is. In `compiled` blocks none is,
    as it would break their graphs.
    """
    model.register_forward_pre_hook(_cast_anew)
    for name, module in model.named_modules() if recompute else ():
        in_block = any(name.startswith(f"{block.path}.") for block in compiled)
        weight = module.weight if type(module) in (nn.Linear, nn.Conv2d) else None
        if weight is not None and weight.numel() >= _LEAST and not in_block:
            module.forward = partial(_computed_again, module.forward)


def _cast_anew(model: nn.Module, inputs: object) -> None:
    """Autocast switches its cache on again where its context ends."""
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        torch.set_autocast_cache_enabled(False)


def _computed_again(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    kind, around = input.device.type, torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if around or not torch.is_grad_enabled() or not torch.is_autocast_enabled(kind):
        return forward(input)
    values = input.to(torch.get_autocast_dtype(kind))  # as the product would, so that this is what is kept
    made: Tensor = checkpoint(forward, values, use_reentrant=False, preserve_rng_state=False)
    return made
