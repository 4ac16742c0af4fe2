"""An adapter in a file of any format, by the layers of diffusers: to start a run with, or to train beside."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from smalti import UserError
from smalti.models import FolderWeights
from smalti_diffusers.lora.encoders import encoder_of, spellings as spellings_in_encoder
from smalti_diffusers.lora.formats import original_layers
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.kinds import change, row_norms
from smalti_diffusers.lora.shapes import MAGNITUDE, factors_of
from smalti_diffusers.lora.trained import has_weight
from smalti_diffusers.options import TITLES

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

    `model` is the model without an adapter, which may be on the meta device; `config` is its configuration. Layers of text
    encoders are those of the adapter if the model holds its encoders, and are left out otherwise. Raises UserError for a file
    of another model.
    """

    def __init__(self, header: AdapterHeader, family: str, model: nn.Module, config: Mapping[str, object]) -> None:
        self.header = header
        shapes = {name: tuple(module.weight.shape) for name, module in model.named_modules() if has_weight(module)}
        self._places = _places(header, family, model, shapes, config)
        for layer, place in self._places.items():
            self._compare(layer, place, shapes[layer])

    @property
    def layers(self) -> Collection[str]:
        """The names of the adapted layers in diffusers."""
        return self.ranks if self.header.kind in ("lora", "dora") else self._places

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each adapted layer of a LoRA, by its name in diffusers."""
        found = {
            layer: (self.header.layer(place.name).rank or 0) if place.rows is None else len(self.matrices(layer)[0])
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
        stored = self.header.layer(place.name)
        with safe_open(self.header.path, framework="pt") as file:
            down, up = file.get_tensor(stored.down).float(), file.get_tensor(stored.up).float()
        if place.rows is not None:
            up = up[place.rows]
            used = up.abs().amax(dim=0) > 0
            down, up = down[used], up[:, used]
        return down, up * self.header.scale(place.name)

    def parts(self, layer: str) -> tuple[dict[str, Tensor], float]:
        """The matrices of a layer of a lokr or loha in fp32, by what they are, and what their product is multiplied by."""
        name = self._places[layer].name
        with safe_open(self.header.path, framework="pt") as file:
            found = {part: file.get_tensor(each).float() for part, each in self.header.layer(name).parts.items()}
        return found, self.header.scale(name)

    def lengths(self, layer: str, weight: Tensor) -> Tensor:
        """(out,) lengths of the rows of a layer with a dora; `weight` is that of the base, in fp32."""
        place = self._places[layer]
        with safe_open(self.header.path, framework="pt") as file:
            found: Tensor = file.get_tensor(self.header.layer(place.name).parts[MAGNITUDE]).float().flatten()
        if place.rows is not None:
            found = found[place.rows]
        if self.header.lengths_of_base:
            down, up = self.matrices(layer)
            parts = {"lora_A": down, "lora_B": up}
            found = found * row_norms(weight + change(parts, 1.0, weight.shape)) / row_norms(weight)
        return found

    def _compare(self, layer: str, place: _Place, shape: tuple[int, ...]) -> None:
        if self.header.kind in ("lokr", "loha"):
            self._compare_products(layer, place, shape)
            return
        stored = self.header.layer(place.name)
        down, up = self.header.shape(stored.down), self.header.shape(stored.up)
        rows = up[0] if place.rows is None else place.rows.stop - place.rows.start
        lengths = stored.parts.get(MAGNITUDE)
        if lengths is not None and not _is_by_output(lengths, self.header.shape(lengths), up[0]):
            raise UserError(
                f"{self.header.path} is a DoRA with a length for each input of {place.name}; supported is one for each output",
                fix="train it with wd_on_output, or start with a LoRA",
            )
        if (rows, *down[1:]) != shape or (place.rows is not None and up[0] < place.rows.stop):
            raise UserError(
                f"{self.header.path} is an adapter of another model: {place.name} has {up[0]} outputs and {list(down[1:])} "
                f"inputs, {layer} of the model has {shape[0]} and {list(shape[1:])}",
                fix="use the adapter with the model that it was trained on",
            )

    def _compare_products(self, layer: str, place: _Place, shape: tuple[int, ...]) -> None:
        """The same of a lokr or loha, which cannot be divided into rows either."""
        header = self.header
        if place.rows is not None:
            raise UserError(
                f"{header.path} has one {TITLES[header.kind]} for {place.name}, which is several layers here, such as {layer}",
                fix="train with the layers of diffusers, or use the file with the tool that made it",
            )
        shapes = header.shapes(place.name)
        if header.kind == "lokr":
            sizes = tuple(first * second for first, second in factors_of(shapes))
        else:
            sizes = (shapes["hada_w1_a"][0], shapes["hada_w1_b"][1])
        if sizes[0] != shape[0] or sizes[1] not in (shape[1], math.prod(shape[1:])):
            raise UserError(
                f"{header.path} is an adapter of another model: {place.name} has {sizes[0]} outputs and {sizes[1]} inputs, "
                f"{layer} of the model has {shape[0]} and {list(shape[1:])}",
                fix="use the adapter with the model that it was trained on",
            )


def _is_by_output(name: str, shape: tuple[int, ...], outputs: int) -> bool:
    """Whether the lengths of a dora are those of rows. LyCORIS has (out, 1) for rows and (1, in) for columns, peft (out,)."""
    return math.prod(shape) == outputs and (shape[0] == outputs or not name.endswith(".dora_scale"))


def _places(
    header: AdapterHeader, family: str, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]
) -> dict[str, _Place]:
    known = _known_names(model, {layer: shape[0] for layer, shape in shapes.items()}, config)
    found: dict[str, _Place] = {}
    lost = []
    of_encoders = header.encoder_layers if any(map(encoder_of, shapes)) else {}
    for name in (*header.layers, *of_encoders):
        places = known.get(name)
        if places is None:
            lost.append(name)
        else:
            found |= {layer: _Place(name=name, rows=rows) for layer, rows in places.items()}
    if lost:
        total = len(header.layers) + len(of_encoders)
        raise UserError(
            f"{header.path} has {len(lost)} of {total} layers that the model does not have, such as {lost[0]}",
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
    if encoder_of(layer):
        return spellings_in_encoder(layer)
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
