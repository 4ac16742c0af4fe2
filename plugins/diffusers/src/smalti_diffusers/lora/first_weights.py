"""The first weights of a model with adapters: the base's, and those of the adapters, from a seed or from a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.models import Weights
from smalti_diffusers.lora.adapter import Lora, adapter_scales, adapter_shapes
from smalti_diffusers.lora.assistant import ASSISTANT
from smalti_diffusers.lora.kinds import change, factor, parted, row_norms
from smalti_diffusers.lora.reading import AdapterFile, padded, target_names
from smalti_diffusers.lora.shapes import MAGNITUDE
from smalti_diffusers.options import TITLES

_BASE = ".base_layer."
_ZEROS = ("lora_B", "lokr_w2", "lokr_w2_b", "hada_w2_a")
_NORMAL = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
"""Standard deviations of a loha's matrices."""


class AdaptedWeights:
    """`Weights` of a model with adapters: the base's under the names that it has now, and adapters made from a seed.

    `model` is the model with adapters, on any device. One matrix of each layer is zero, so that the first prediction is the
    base's; those of lokr and loha are initialised as in LyCORIS. Each matrix has random numbers of its own, a function of seed
    and name. Layers in `start` begin with the matrices of that file. `assistant` has the weights of the second adapter.
    """

    def __init__(
        self,
        base: Weights,
        model: nn.Module,
        lora: Lora,
        seed: int,
        start: AdapterFile | None = None,
        assistant: AdapterFile | None = None,
    ) -> None:
        self._base = base
        self._adapters = adapter_shapes(model)
        self._scales = adapter_scales(model)
        self._dtypes = {
            name: parameter.dtype for name, parameter in model.named_parameters() if name.endswith(f"{_BASE}weight")
        }
        self._lora = lora
        self._seed = seed
        self._assistants = {
            f"{layer}.lora_{matrix}.{ASSISTANT}.weight": (layer, number)
            for layer in (assistant.ranks if assistant is not None else ())
            for number, matrix in enumerate("AB")
        }
        self._assistant = assistant
        self._start = start
        if start is not None:
            self._check_start(start)

    def names(self) -> Iterator[str]:
        for name in self._base.names():
            module, _, own = name.rpartition(".")
            adapted = module in self._scales or f"{module}.lora_A.{ASSISTANT}.weight" in self._assistants
            yield f"{module}{_BASE}{own}" if adapted else name
        yield from self._adapters
        yield from self._assistants

    def get(self, name: str) -> Tensor:
        if self._assistant is not None and name in self._assistants:
            layer, number = self._assistants[name]
            return self._assistant.matrices(layer)[number]
        place = parted(name)
        if place is None:
            return self._base.get(name.replace(_BASE, "."))
        layer, part = place
        shape = self._adapters[name]
        if part == MAGNITUDE:
            return self._lengths(layer).view(shape)
        if self._start is not None and layer in self._start.layers:
            if part.startswith("lora_"):
                return self._from_file(self._start, layer, name)
            return self._of_product(self._start, layer, part, shape)
        return self._new(name, part, shape)

    def _check_start(self, start: AdapterFile) -> None:
        """Raises UserError if the file has another kind of adapter, or layers that the run does not adapt."""
        kind = start.header.kind
        if kind != self._lora.kind and (kind, self._lora.kind) != ("lora", "dora"):
            raise UserError(
                f"{start.header.path} is a {TITLES[kind]}, and the run trains a {TITLES[self._lora.kind]}",
                fix=f"--lora_kind={kind}",
            )
        lost = sorted(layer for layer in start.layers if layer not in self._scales and not layer.startswith(self._lora.idle))
        if lost:
            raise UserError(
                f"{start.header.path} has {len(lost)} layers that the run does not adapt, such as {lost[0]}",
                fix=f"--lora_targets={target_names(start.layers)}",
            )

    def _lengths(self, layer: str) -> Tensor:
        """(out,) lengths of rows of a dora: those in the file, or that the weight has with the first values of the LoRA."""
        weight = self._base.get(f"{layer}.weight").to(self._dtypes[f"{layer}{_BASE}weight"]).float()
        if self._start is not None and self._start.header.kind == "dora" and layer in self._start.layers:
            return self._start.lengths(layer, weight)
        names = (f"{layer}.lora_{matrix}.default.weight" for matrix in "AB")
        down, up = (self.get(name) for name in names)
        return row_norms(weight + change({"lora_A": down, "lora_B": up}, self._scales[layer], weight.shape))

    def _from_file(self, start: AdapterFile, layer: str, name: str) -> Tensor:
        """A matrix that adds to the weight what the file adds, at the scale of this run; unused ranks add nothing."""
        down, up = start.matrices(layer)
        shape = self._adapters[name]
        rank = shape[0] if ".lora_A." in name else shape[1]
        if len(down) > rank:
            raise UserError(
                f"{layer} has rank {len(down)} in {start.header.path}, and the run has rank {rank}",
                fix=f"--lora_rank={len(down)}",
            )
        if ".lora_A." not in name:
            return padded(up / self._scales[layer], rank, dim=1)
        return torch.cat([down, self._new(name, "lora_A", shape)[len(down) :]])

    def _of_product(self, start: AdapterFile, layer: str, part: str, shape: Sequence[int]) -> Tensor:
        """A matrix of a lokr or loha in the file, at the scale of this run."""
        parts, scale = start.parts(layer)
        if part in ("lokr_w1", "lokr_w2") and part not in parts:
            parts[part] = factor(parts, int(part[-1]))
        if part not in parts or (tensor := parts[part]).shape != tuple(shape):
            held = ", ".join(f"{name} {list(each.shape)}" for name, each in sorted(parts.items()))
            raise UserError(
                f"{layer} has in {start.header.path} {held}, and in the run {part} {list(shape)}",
                fix="leave out --lora_rank, --lora_rank_pattern, --lokr_factor, --lokr_factor_pattern and --lokr_full, "
                "which the file then says; a file whose layers differ in them cannot be started from",
            )
        return tensor * (scale / self._scales[layer]) if part in ("lokr_w1", "hada_w1_a") else tensor

    def _new(self, name: str, part: str, shape: Sequence[int]) -> Tensor:
        if part in _ZEROS:
            return torch.zeros(*shape)
        number = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), "little")
        random = torch.Generator().manual_seed(number >> 1)
        if part in _NORMAL:
            return torch.randn(*shape, generator=random) * _NORMAL[part]
        if part == "lora_A" and self._lora.init == "orthogonal":  # as large as those of Kaiming's
            return nn.init.orthogonal_(torch.empty(*shape), gain=1 / math.sqrt(3), generator=random)
        if part == "lora_A" and self._lora.init == "gaussian":
            return torch.randn(*shape, generator=random) / shape[0]
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        return torch.rand(*shape, generator=random) * 2 * bound - bound
