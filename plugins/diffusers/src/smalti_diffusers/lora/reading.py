"""An adapter in a file of any format, by the layers of diffusers: to start a run with, or to train beside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from smalti import UserError
from smalti.models import FolderWeights
from smalti_diffusers.lora.formats import has_weight, original_layers
from smalti_diffusers.lora.header import AdapterHeader

_PREFIXES = (
    "",
    "transformer.",
    "unet.",
    "base_model.model.",
    "unet.base_model.model.",
    "diffusion_model.",
    "model.diffusion_model.",
)
_UNDERSCORED = ("lora_unet_", "lora_transformer_", "lycoris_")


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a layer of diffusers is in the file: a layer of the file, and its rows in lora_B. None: all rows."""

    name: str
    rows: slice | None


class AdapterFile:
    """The matrices of an adapter. Names and shapes are compared with the model at once, tensors are read when they are needed.

    `model` is the model without an adapter, which may be on the meta device; `config` is its configuration. Raises UserError
    for a file of another model.
    """

    def __init__(self, header: AdapterHeader, family: str, model: nn.Module, config: Mapping[str, object]) -> None:
        self.header = header
        shapes = {name: tuple(module.weight.shape) for name, module in model.named_modules() if has_weight(module)}
        self._places = _places(header, family, model, shapes, config)
        for layer, place in self._places.items():
            self._compare(layer, place, shapes[layer])

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each adapted layer, by its name in diffusers."""
        found = {
            layer: self.header.layers[place.name].rank if place.rows is None else len(self.matrices(layer)[0])
            for layer, place in self._places.items()
        }
        return {layer: rank for layer, rank in found.items() if rank}

    def digest(self) -> str:
        """Tells this file from others, wherever it is."""
        return FolderWeights(self.header.path).digest()

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """lora_A (rank, in) and lora_B (out, rank) of a layer in fp32; alpha / rank is multiplied into lora_B.

        Of a layer that the file keeps joined with others, ranks that do not reach its rows are left out.
        """
        place = self._places[layer]
        stored = self.header.layers[place.name]
        with safe_open(self.header.path, framework="pt") as file:
            down, up = file.get_tensor(stored.down).float(), file.get_tensor(stored.up).float()
        if place.rows is not None:
            up = up[place.rows]
            used = up.abs().amax(dim=0) > 0
            down, up = down[used], up[:, used]
        return down, up * self.header.scale(place.name)

    def _compare(self, layer: str, place: _Place, shape: tuple[int, ...]) -> None:
        stored = self.header.layers[place.name]
        down, up = self.header.shape(stored.down), self.header.shape(stored.up)
        rows = up[0] if place.rows is None else place.rows.stop - place.rows.start
        if (rows, *down[1:]) != shape or (place.rows is not None and up[0] < place.rows.stop):
            raise UserError(
                f"{self.header.path} is an adapter of another model: {place.name} has {up[0]} outputs and {list(down[1:])} "
                f"inputs, {layer} of the model has {shape[0]} and {list(shape[1:])}",
                fix="use the adapter with the model that it was trained on",
            )


def _places(
    header: AdapterHeader, family: str, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]
) -> dict[str, _Place]:
    known = _known_names(model, {layer: shape[0] for layer, shape in shapes.items()}, config)
    found: dict[str, _Place] = {}
    lost = []
    for name in header.layers:
        places = known.get(name)
        if places is None:
            lost.append(name)
        else:
            found |= {layer: _Place(name=name, rows=rows) for layer, rows in places.items()}
    if lost:
        raise UserError(
            f"{header.path} has {len(lost)} of {len(header.layers)} layers that the model does not have, such as {lost[0]}",
            fix=f"use a LoRA of {family}; its layers are compared by name",
        )
    return found


def _known_names(
    model: nn.Module, sizes: Mapping[str, int], config: Mapping[str, object]
) -> dict[str, dict[str, slice | None]]:
    """Every name that a layer can have in a file -> the layers of diffusers there, with their rows."""
    known: dict[str, dict[str, slice | None]] = {}
    for original, members in original_layers(model, config).items():
        rows: dict[str, slice | None] = {}
        start = 0
        for member in members:
            rows[member] = slice(start, start + sizes[member]) if len(members) > 1 else None
            start += sizes[member]
        known |= dict.fromkeys(_spellings(original), rows)
    for layer in sizes:
        known |= {spelling: {layer: None} for spelling in _spellings(layer)}
    return known


def _spellings(layer: str) -> list[str]:
    old = re.sub(r"\.to_out\.0$", ".to_out", layer)
    old = re.sub(r"\.(to_[a-z]+)$", r".processor.\1", old)
    flat = layer.replace(".", "_")
    return [f"{prefix}{name}" for prefix in _PREFIXES for name in {layer, old}] + [f"{prefix}{flat}" for prefix in _UNDERSCORED]


def target_names(layers: Iterable[str]) -> str:
    """`--lora_targets` for these layers: the ends of their names within blocks."""
    ends = {
        cast(re.Match[str], re.fullmatch(r"(?:.*?(?:blocks|layers|refiner|attentions|resnets)\.\d+\.)*(.+)", each))[1]
        for each in layers
    }
    return ",".join(sorted(ends))


def padded(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """With zeros up to this rank."""
    shape = list(tensor.shape)
    shape[dim] = rank - shape[dim]
    return torch.cat([tensor, torch.zeros(shape)], dim=dim)
