"""The complete model with an adapter merged into it, tensor by tensor, computed in fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from smalti.checkpoint import DTYPES, Computed
from smalti.models import SeededWeights, Weights
from smalti_diffusers.lora.encoders import BaseWeights, JoinedWeights
from smalti_diffusers.lora.trained import AdaptedLayer, TrainedAdapter


def merged_weights(base: BaseWeights, model: nn.Module, adapter: TrainedAdapter) -> dict[str, Computed]:
    """The tensors of the model, by name. They have the types of the base unless the export has one.

    `base` are the unquantised weights, `model` is the model without an adapter, which may be on the meta device. The memory of
    one tensor is needed at a time.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = {}
    for name in base.names():
        if name not in shapes:
            continue
        layer, _, own = name.rpartition(".")
        adapted = adapter.layers.get(layer) if own == "weight" else None
        compute: Callable[[], Tensor] = partial(base.get, name)
        if adapted is not None:
            compute = partial(_merged, base, name, adapter, adapted)
        tensors[name] = Computed(shape=shapes[name], compute=compute, dtype=_dtype(base, name))
    return tensors


def base_tensors(base: BaseWeights, model: nn.Module, names: Collection[str]) -> dict[str, Computed]:
    """These tensors of the base, which are parameters of `model`, with their types unless the export has one."""
    return {
        name: Computed(shape=tuple(each.shape), compute=partial(base.get, name), dtype=_dtype(base, name))
        for name, each in model.named_parameters()
        if name in names
    }


def _dtype(base: BaseWeights, name: str) -> torch.dtype:
    """The type of a tensor of the base; what a file keeps in 8 bits becomes bf16."""
    if isinstance(base, JoinedWeights):
        base, name = base.place(name)
    dtype = base.get(name).dtype if isinstance(base, SeededWeights) else DTYPES[base.stored(name).dtype]
    return torch.bfloat16 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


def _merged(base: Weights, name: str, adapter: TrainedAdapter, layer: AdaptedLayer) -> Tensor:
    return adapter.changed(layer, base.get(name).float())
