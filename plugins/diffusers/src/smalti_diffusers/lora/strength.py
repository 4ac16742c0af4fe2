"""Making the trained adapter weaker or stronger for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from smalti_diffusers.lora.adapter import ADAPTER


@contextmanager
def adapter_scaled(model: nn.Module, strength: float, adapter: str = ADAPTER) -> Iterator[None]:
    """Within it, what an adapter adds is multiplied by `strength`: the trained one, or another. Its weights are not touched.

    0 gives the prediction of the model without it, to the bit. peft's own switch would also change which parameters train.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and adapter in module.scaling]
    scaled = [(layer.scaling, layer.scaling[adapter]) for layer in layers]
    try:
        for scaling, factor in scaled:
            scaling[adapter] = factor * strength
        yield
    finally:
        for scaling, factor in scaled:
            scaling[adapter] = factor
