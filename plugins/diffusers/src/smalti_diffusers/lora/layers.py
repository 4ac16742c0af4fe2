"""Layers with adapters, where peft's own would take more memory or be less exact.

Shapes: (..., in) inputs and (..., out) outputs of linear layers, (B, in, height, width) and so on of convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from peft import LoKrConfig, LoKrModel
from peft.tuners.lokr.layer import Linear as LoKrLinear, LoKrLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from smalti_diffusers.lora.kinds import ADAPTER, by_row, change, row_norms
from smalti_diffusers.lora.shapes import MAGNITUDE


class FactoredLinear(LoKrLinear):
    """A linear layer with a lokr that never computes kron(w1, w2), which would be as large as the weight of the layer."""

    def _get_delta_activations(self, adapter_name: str, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        first: Tensor = self.lokr_w1[adapter_name] * self.scaling[adapter_name]
        if adapter_name in self.lokr_w2:
            seconds = [self.lokr_w2[adapter_name]]
        else:
            seconds = [self.lokr_w2_b[adapter_name], self.lokr_w2_a[adapter_name]]
        cast_input: Tensor = self._cast_input_dtype(input, first.dtype)
        values = cast_input.view(*cast_input.shape[:-1], first.shape[1], -1)
        for second in seconds:
            values = values @ second.T
        return (first @ values).flatten(-2)


class KroneckerModel(LoKrModel):
    """peft's tuner with the layers above, and a factor for each layer."""

    layers_mapping: ClassVar[dict[type[nn.Module], type[LoKrLayer]]] = {  # type: ignore[misc]
        **LoKrModel.layers_mapping,
        nn.Linear: FactoredLinear,
    }
    factors: Mapping[str, int]
    """By the name of a layer: how its sizes are divided."""

    @classmethod
    def attach(cls, model: nn.Module, config: LoKrConfig, factors: Mapping[str, int]) -> None:
        """Put layers with adapters on the meta device into the model."""
        kind = type(cls.__name__, (cls,), {"factors": factors})
        kind(model, config, ADAPTER, low_cpu_mem_usage=True)
        for module in model.modules():
            if isinstance(module, LoKrLayer) and ADAPTER in module.lokr_w1 and ADAPTER in module.lokr_w2:
                module.scaling[ADAPTER] = 1.0

    def _create_and_replace(self, config: LoKrConfig, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        config = replace(config, decompose_factor=self.factors[kwargs["current_key"]])
        super()._create_and_replace(config, *args, **kwargs)


class Decomposed:
    """A dora in a layer of peft: its variant of a LoRA for one adapter.

    Norms are those of the weight that the layer has, in fp32: in bf16, the first prediction would not be that of the base.
    They are constants for the gradient, as in the paper (Liu et al. 2024, section 4.3). Dropout is on inputs of the LoRA alone.
    """

    def __init__(self) -> None:
        self.strength = 1.0
        """The output is interpolated between that of the base, 0, and that with the adapter, 1: as if weights were."""

    def forward(self, module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **unused: object) -> Tensor:
        base = module.get_base_layer()
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale = module.scaling[active_adapter]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            weight = base.weight.float()
            parts = {"lora_A": down.weight, "lora_B": up.weight}
            norms = row_norms(weight + change(parts, scale, weight.shape))
        lengths = getattr(module, MAGNITUDE)[active_adapter].weight.flatten() / norms
        added = up(down(module.lora_dropout[active_adapter](x))) * scale
        linear = result
        if weight.ndim > 2:
            lengths = by_row(lengths, weight.ndim - 1)
        if base.bias is not None:
            linear = result - (by_row(base.bias, weight.ndim - 1) if weight.ndim > 2 else base.bias)
        changed: Tensor = result + self.strength * ((lengths - 1) * linear + lengths * added)
        return changed


def decompose(model: nn.Module) -> None:
    """Let the dora layers of a model compute as `Decomposed` does."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_variant:
            module.lora_variant[ADAPTER] = cast(Any, Decomposed())


def declare_reads(model: nn.Module) -> None:
    """Say of each layer that it reads parameters of its parts without calling them, for backends that gather them."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            cast(Any, module).reads_parts = True
