"""Making the trained adapter weaker or stronger for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from smalti_diffusers.lora.adapter import ADAPTER


@contextmanager
def adapter_scaled(model: nn.Module, strength: float) -> Iterator[None]:
    """Within it, what the trained adapter adds is multiplied by `strength`. Its weights are not touched.

    0 gives the prediction of the model without it, to the bit. peft's own switch would also change which parameters train.
    """
    from peft.tuners.lora import LoraLayer

    scaled = [(layer.scaling, layer.scaling[ADAPTER]) for layer in model.modules() if isinstance(layer, LoraLayer)]
    try:
        for scaling, factor in scaled:
            scaling[ADAPTER] = factor * strength
        yield
    finally:
        for scaling, factor in scaled:
            scaling[ADAPTER] = factor
