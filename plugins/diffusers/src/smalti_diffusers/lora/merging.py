"""The complete model with an adapter merged into it, tensor by tensor: W + alpha / rank * lora_B @ lora_A, computed in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from smalti.checkpoint import Computed
from smalti.models import Weights
from smalti_diffusers.lora.formats import AdaptedLayer, TrainedAdapter


def merged_weights(base: Weights, model: nn.Module, adapter: TrainedAdapter) -> dict[str, Computed]:
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
        tensors[name] = Computed(shape=shapes[name], compute=compute, dtype=base.get(name).dtype)
    return tensors


def _merged(base: Weights, name: str, adapter: TrainedAdapter, layer: AdaptedLayer) -> Tensor:
    weight = base.get(name).float()
    down, up = adapter.down(layer).compute(), adapter.up(layer, fold=True).compute()
    return weight.add_((up.flatten(1) @ down.flatten(1)).view(weight.shape))
