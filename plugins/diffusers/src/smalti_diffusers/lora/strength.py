"""Making the trained adapter weaker or stronger for a while."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from smalti_diffusers.lora.kinds import ADAPTER


@contextmanager
def adapter_scaled(model: nn.Module, strength: float, adapter: str = ADAPTER) -> Iterator[None]:
    """Within it, what an adapter adds is multiplied by `strength`: the trained one, or another. Its weights are not touched.

    0 gives the prediction of the model without it, to the bit. peft's own switch would also change which parameters train.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuned: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    layers = [module for module in tuned if adapter in module.scaling]
    factors = [_factor(layer, adapter) for layer in layers]
    before = [holder[name] for holder, name in factors]
    try:
        for (holder, name), value in zip(factors, before, strict=True):
            holder[name] = value * strength
        yield
    finally:
        for (holder, name), value in zip(factors, before, strict=True):
            holder[name] = value


def _factor(layer: Any, adapter: str) -> tuple[MutableMapping[str, float], str]:
    """Where a layer keeps what the change of its output is multiplied by: its scale, or the strength of a `Decomposed`."""
    variants = getattr(layer, "lora_variant", {})
    return (vars(variants[adapter]), "strength") if adapter in variants else (layer.scaling, adapter)
