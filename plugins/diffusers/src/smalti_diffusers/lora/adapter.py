"""LoRA (Hu et al. 2021) by way of peft: small matrices beside frozen layers, and the first weights of both.

A layer `attn.to_q` becomes `attn.to_q.base_layer`, with `attn.to_q.lora_A.default` (rank, in) and `attn.to_q.lora_B.default`
(out, rank) beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.models import Weights
from smalti_diffusers.lora.assistant import ASSISTANT, activate, attach_assistant
from smalti_diffusers.lora.reading import AdapterFile, padded, target_names

ADAPTER = "default"
"""What peft calls the trained adapter."""
_BASE = ".base_layer."
_NAMES = "--lora_targets=NAME,..., such as to_q,to_k,to_v"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """An adapter. It is added with the weight `alpha / rank`; `init` is that of lora_A.

    `targets` are ends of module names, from a dot on, or regular expressions of such ends.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    init: Literal["kaiming", "gaussian"] = "kaiming"


def attach(model: nn.Module, lora: Lora, base_dtype: torch.dtype, assistant: AdapterFile | None = None) -> nn.Module:
    """The same model, frozen, in `base_dtype`, with adapters on the meta device that train in fp32.

    The layers of `assistant` get a second adapter, frozen like the model.

    Raises UserError for a target that no layer has, or that is no layer an adapter fits.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = "|".join(map(re.escape, adapted_layers(model, lora.targets)))
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    config = LoraConfig(**settings)  # type: ignore[arg-type]  # alpha may be a fraction, whatever the annotation says
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(f"an adapter does not fit: {error}", fix="--lora_targets=NAME,... of linear layers") from error
    if assistant is not None:
        attach_assistant(model, assistant)
        activate(model, [ADAPTER, ASSISTANT])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name))
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(base_dtype)
    return model


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The names of the modules that `targets` select, each once.

    A target of letters, digits, `_`, `-` and `.` is the end of their names. Any other is a regular expression of it, which
    selects the layers that an adapter fits: linear ones, and convolutions without groups. Raises UserError if one selects none.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    lost = []
    for target in targets:
        plain = re.fullmatch(r"[\w.-]+", target)
        try:
            end = re.compile(rf"(?:.*\.)?(?:{re.escape(target) if plain else target})")
        except re.error as error:
            raise UserError(f"{target} in lora_targets is not a regular expression: {error}", fix=_NAMES) from None
        names = [name for name, module in modules.items() if end.fullmatch(name) and (plain or _fits(module))]
        found |= dict.fromkeys(names)
        lost += [] if names else [target]
    if lost:
        raise UserError(f"no layer's name ends in {', '.join(lost)}", fix=_NAMES)
    return list(found)


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


class AdaptedWeights:
    """`Weights` of a model with adapters: the base's under the names that it has now, and adapters made from a seed.

    `adapters` are the shapes of the adapters' parameters. lora_B is zero, so that the first prediction is the base's. Each
    lora_A has random numbers of its own, a function of seed and name. Layers in `start` begin with the matrices of that file.
    `assistant` has the weights of the second adapter.
    """

    def __init__(
        self,
        base: Weights,
        adapters: Mapping[str, Sequence[int]],
        lora: Lora,
        seed: int,
        start: AdapterFile | None = None,
        assistant: AdapterFile | None = None,
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._lora = lora
        self._seed = seed
        self._adapted = {name.partition(".lora_")[0] for name in adapters}
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
            adapted = module in self._adapted or f"{module}.lora_A.{ASSISTANT}.weight" in self._assistants
            yield f"{module}{_BASE}{own}" if adapted else name
        yield from self._adapters
        yield from self._assistants

    def get(self, name: str) -> Tensor:
        if self._assistant is not None and name in self._assistants:
            layer, number = self._assistants[name]
            return self._assistant.matrices(layer)[number]
        if name not in self._adapters:
            return self._base.get(name.replace(_BASE, "."))
        shape = self._adapters[name]
        layer = name.partition(".lora_")[0]
        if self._start is not None and layer in self._start.ranks:
            return self._from_file(self._start, layer, name)
        return self._new(name, shape)

    def _check_start(self, start: AdapterFile) -> None:
        """Raises UserError if the file has layers that the run does not adapt."""
        if lost := sorted(start.ranks.keys() - self._adapted):
            raise UserError(
                f"{start.header.path} has {len(lost)} layers that the run does not adapt, such as {lost[0]}",
                fix=f"--lora_targets={target_names(start.ranks)}",
            )

    def _from_file(self, start: AdapterFile, layer: str, name: str) -> Tensor:
        """A matrix that adds to the weight what the file adds, with the alpha / rank of this run; unused ranks add nothing."""
        down, up = start.matrices(layer)
        rank = self._lora.rank
        if len(down) > rank:
            raise UserError(
                f"{layer} has rank {len(down)} in {start.header.path}, and the run has rank {rank}",
                fix=f"--lora_rank={len(down)}",
            )
        if ".lora_A." not in name:
            return padded(up * (rank / self._lora.alpha), rank, dim=1)
        return torch.cat([down, self._new(name, self._adapters[name])[len(down) :]])

    def _new(self, name: str, shape: Sequence[int]) -> Tensor:
        if ".lora_A." not in name:
            return torch.zeros(*shape)
        number = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), "little")
        random = torch.Generator().manual_seed(number >> 1)
        if self._lora.init == "gaussian":
            return torch.randn(*shape, generator=random) / self._lora.rank
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        return torch.rand(*shape, generator=random) * 2 * bound - bound


def adapter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of adapters that train, in a model that has them."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if _is_trained(name)}


def _is_trained(name: str) -> bool:
    return ".lora_" in name and f".{ADAPTER}." in name
