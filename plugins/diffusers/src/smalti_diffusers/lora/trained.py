"""The adapter in a checkpoint, layer by layer, with the model around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from smalti.checkpoint import Computed
from smalti_diffusers.lora.kinds import changed, is_full, parted
from smalti_diffusers.lora.shapes import rank_of
from smalti_diffusers.options import Kind

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """An adapted layer of diffusers. `parts` are the names of its tensors in the checkpoint, by what they are.

    The rank is None of a lokr of two full matrices. `scale` is what the product of the matrices is multiplied by.
    """

    name: str
    parts: Mapping[str, str]
    rank: int | None
    scale: float

    @property
    def width(self) -> int:
        """The rank of a layer that has one."""
        return cast(int, self.rank)


class TrainedAdapter:
    """The adapter in a checkpoint, and the model around it, which may be on the meta device."""

    def __init__(self, folder: ExportFolder, model: nn.Module) -> None:
        said = folder.adapter
        assert said is not None, "the checkpoint of an adapter says what it is"
        self._folder = folder
        self.kind = cast(Kind, said.get("kind", "lora"))
        self.rank = cast(int, said["rank"])
        self.scale = cast(float, said["alpha"]) / (math.sqrt(self.rank) if said.get("stabilised") else self.rank)
        """That of layers without one of their own."""
        self.timed = cast(Mapping[str, float], said.get("timed", {}))
        """"least" and "exponent" of a T-LoRA, as in `timed`; empty for any other."""
        self.model = model
        self.sizes = {name: module.weight.shape[0] for name, module in model.named_modules() if has_weight(module)}
        """Outputs of every layer of the model."""
        found: dict[str, dict[str, str]] = {}
        for name in folder.tensors:
            if place := parted(name):
                found.setdefault(place[0], {})[place[1]] = name
        scales = cast(Mapping[str, float], said.get("scales", {}))
        self.layers = {name: self._layer(name, parts, scales.get(name, self.scale)) for name, parts in found.items()}

    def _layer(self, name: str, parts: Mapping[str, str], scale: float) -> AdaptedLayer:
        rank = rank_of({part: self._folder.tensors[each].shape for part, each in parts.items()})
        return AdaptedLayer(name=name, parts=parts, rank=rank, scale=1.0 if is_full(parts) else scale)

    def part(self, layer: AdaptedLayer, part: str, factor: float = 1.0) -> Computed:
        """One tensor of a layer, times a factor."""
        return self._computed(layer.parts[part], lambda tensor: tensor if factor == 1 else tensor * factor)

    def down(self, layer: AdaptedLayer) -> Computed:
        """lora_A: (rank, in), or (rank, in, height, width) of a convolution."""
        return self.part(layer, "lora_A")

    def up(self, layer: AdaptedLayer, *, fold: bool = False) -> Computed:
        """lora_B: (out, rank), or (out, rank, 1, 1) of a convolution. With `fold`, times the scale of the layer."""
        return self.part(layer, "lora_B", layer.scale if fold else 1.0)

    def tensors(self, layer: AdaptedLayer) -> dict[str, Tensor]:
        """All tensors of a layer, by what they are."""
        return {part: self._folder.tensor(name) for part, name in layer.parts.items()}

    def changed(self, layer: AdaptedLayer, weight: Tensor) -> Tensor:
        """A weight of the base, in fp32, with the adapter."""
        return changed(weight, self.tensors(layer), layer.scale)

    def shape(self, layer: AdaptedLayer, part: str) -> tuple[int, ...]:
        return self._folder.tensors[layer.parts[part]].shape

    def _computed(self, name: str, change: Callable[[Tensor], Tensor]) -> Computed:
        return Computed(shape=self._folder.tensors[name].shape, compute=lambda: change(self._folder.tensor(name)))


def has_weight(module: nn.Module) -> bool:
    """Whether a module has a weight that an adapter could change."""
    return isinstance(getattr(module, "weight", None), Tensor)
