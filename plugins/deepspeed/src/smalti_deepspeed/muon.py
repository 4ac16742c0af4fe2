"""DeepSpeed's Muon in stage 3, made to compute what `--optimizer=muon` computes under every other strategy.

Written for 0.19: `_apply_muon_to_accumulated_grads` of `runtime/zero/stage3.py` replaces the gradients of matrices by their
orthogonalised momentum once per step; the optimizer then only applies rate and weight decay to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn

from smalti_deepspeed.parsing import section
from smalti_deepspeed.startup import replaced


def with_muon(document: Mapping[str, object]) -> dict[str, object]:
    """The configuration of a run with Muon, completed: gradients are not reduced in shards, torch's AdamW does the rest."""
    params = {"torch_adam": True, "ns_method": "standard"} | section(document, "optimizer", "params")
    zero = {**section(document, "zero_optimization"), "reduce_scatter": False}
    return {**document, "optimizer": {**section(document, "optimizer"), "params": params}, "zero_optimization": zero}


@contextmanager
def matrices_marked() -> Iterator[None]:
    """Have engines that are made in this block apply Muon to the parameters with two dimensions, as smalti's own does.

    DeepSpeed's choice includes weights of convolutions, at which it fails, and depends on names. The groups of parameters keep
    their `rate_ratio`.
    """

    def mark(_config: object, model: nn.Module) -> None:
        for parameter in cast(Any, model.parameters()):
            parameter.use_muon = len(getattr(parameter, "ds_shape", parameter.shape)) == 2

    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    with ExitStack() as stack:
        stack.enter_context(replaced(import_module("deepspeed"), "set_optimizer_flags", mark))
        for name in ("_MUON_HALF_KEYS", "_ADAM_HALF_KEYS"):
            stack.enter_context(replaced(engine, name, (*getattr(engine, name), "rate_ratio")))
        yield


@contextmanager
def sized_as_adamw() -> Iterator[None]:
    """Give the updates of matrices the size of AdamW's (Liu et al. 2025), so that one learning rate serves both."""
    module = import_module("deepspeed.runtime.zero.muon.original_muon")
    with replaced(module, "_aspect_ratio_scale", lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))):
        yield


def clip_before_muon(zero: Any, norm: Tensor, limit: float, *, by_value: bool) -> None:
    """Clip the gradients in place. DeepSpeed would clip the updates that Muon makes of them."""
    if limit <= 0:
        return
    excess = ((norm + 1e-6) / limit).clamp(min=1.0)  # as DeepSpeed computes it
    for gradients in zero.averaged_gradients.values():
        for each in gradients or ():
            each.clamp_(-limit, limit) if by_value else each.div_(excess)
