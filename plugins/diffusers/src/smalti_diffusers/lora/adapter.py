"""Adapters by way of peft: small matrices beside frozen layers. Their first values are in `first_weights`.

A layer `attn.to_q` becomes `attn.to_q.base_layer`, with for example `attn.to_q.lora_A.default` (rank, in) and
`attn.to_q.lora_B.default` (out, rank) beside it; `kinds` has the other kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti_diffusers.lora.assistant import ASSISTANT, activate, attach_assistant
from smalti_diffusers.lora.kinds import ADAPTER, parted
from smalti_diffusers.lora.reading import AdapterFile
from smalti_diffusers.options import Init, Kind

_NAMES = "--lora_targets=NAME,..., such as to_q,to_k,to_v"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """An adapter. `targets` and `excluded` select layers as `adapted_layers` says.

    Of the patterns, which are targets with a value, the first that selects a layer counts. `alpha` None stands for the rank of
    each layer. `full` is whether a lokr has no rank. `init` is that of lora_A.
    """

    rank: int
    alpha: float | None
    targets: tuple[str, ...]
    kind: Kind = "lora"
    dropout: float = 0.0
    excluded: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    """How names of layers begin that the prediction does not depend on: these get no adapter."""
    stabilised: bool = False
    """The scale is alpha / sqrt(rank): rsLoRA (Kalajdzievski 2023)."""
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    factor: int = -1
    factors: tuple[tuple[str, int], ...] = ()
    full: bool = False
    init: Init = "kaiming"
    rate_ratio: float = 1.0
    """What the learning rate of lora_B is multiplied by: LoRA+ (Hayou et al. 2024)."""
    least: int | None = None
    """The active ranks at pure noise; None if all are active always. See `timed`."""
    exponent: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Layer:
    rank: int
    alpha: float
    factor: int


def attach(model: nn.Module, lora: Lora, base_dtype: torch.dtype, assistant: AdapterFile | None = None) -> nn.Module:
    """The same model, frozen, in `base_dtype`, with adapters on the meta device that train in fp32.

    What diffusers keeps in fp32 in every model of this class is in fp32 here too. The layers of
    `assistant` get a second adapter, frozen like the model.

    Raises UserError for a target that no layer has, or that is no layer an adapter fits.
    """
    layers = _layers(model, lora)
    try:
        _inject(model, lora, layers)
    except (ValueError, TypeError) as error:
        raise UserError(f"an adapter does not fit: {error}", fix="--lora_targets=NAME,... of linear layers") from error
    if assistant is not None:
        attach_assistant(model, assistant)
        activate(model, [ADAPTER, ASSISTANT])
    in_fp32 = set(cast("list[str] | None", getattr(model, "_keep_in_fp32_modules", None)) or ())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parted(name) is not None)
        if not parameter.requires_grad and in_fp32.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(base_dtype)
    return model


def _inject(model: nn.Module, lora: Lora, layers: dict[str, _Layer]) -> None:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model

    targets = "|".join(map(re.escape, layers))
    alpha = lora.alpha or lora.rank
    ranks = {f"^{re.escape(name)}$": layer.rank for name, layer in layers.items() if layer.rank != lora.rank}
    alphas = {f"^{re.escape(name)}$": layer.alpha for name, layer in layers.items() if layer.alpha != alpha}
    if lora.kind in ("lora", "dora"):
        settings: dict[str, Any] = {
            "r": lora.rank,
            "lora_alpha": alpha,
            "lora_dropout": lora.dropout,
            "target_modules": targets,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "use_rslora": lora.stabilised,
            "use_dora": lora.kind == "dora",
        }
        config = LoraConfig(**settings)  # alpha may be a fraction, whatever its annotation says
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        if lora.kind == "lora":
            return
    from smalti_diffusers.lora.layers import KroneckerModel, declare_reads, decompose

    common: dict[str, Any] = {"r": lora.rank, "alpha": alpha, "target_modules": targets}
    common |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    if lora.kind == "dora":
        decompose(model)
    elif lora.kind == "lokr":
        factors = {name: layer.factor for name, layer in layers.items()}
        KroneckerModel.attach(model, LoKrConfig(**common), factors)
    else:
        inject_adapter_in_model(LoHaConfig(**common), model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    declare_reads(model)


def _layers(model: nn.Module, lora: Lora) -> dict[str, _Layer]:
    """The layers that get an adapter, and what patterns say of each."""
    names = [name for name in adapted_layers(model, lora.targets) if not name.startswith(lora.idle)]
    if lora.excluded:
        out = set(adapted_layers(model, lora.excluded, "lora_exclude"))
        names = [name for name in names if name not in out]
        if not names:
            raise UserError("lora_exclude leaves no layer to adapt", fix="exclude fewer layers, or add to --lora_targets")
    ranks = _by_layer(model, names, lora.ranks, "lora_rank_pattern")
    alphas = _by_layer(model, names, lora.alphas, "lora_alpha_pattern")
    factors = _by_layer(model, names, lora.factors, "lokr_factor_pattern")
    found = {}
    for name in names:
        rank = ranks.get(name, lora.rank)
        if lora.full:
            rank = max(cast(Tensor, model.get_submodule(name).weight).shape[:2])
        alpha = alphas.get(name, lora.alpha or rank)
        found[name] = _Layer(rank=int(rank), alpha=alpha, factor=int(factors.get(name, lora.factor)))
    return found


def _by_layer(model: nn.Module, layers: Sequence[str], patterns: Sequence[tuple[str, float]], option: str) -> dict[str, float]:
    """The value of each layer that a pattern selects. Raises UserError for a pattern that selects none of `layers`."""
    found: dict[str, float] = {}
    for pattern, value in patterns:
        chosen = set(layers).intersection(adapted_layers(model, (pattern,), option))
        if not chosen:
            raise UserError(f"{pattern} in {option} selects no layer that is adapted", fix=f"leave {pattern} out of {option}")
        found = dict.fromkeys(chosen, value) | found
    return found


def adapted_layers(model: nn.Module, targets: Sequence[str], option: str = "lora_targets") -> list[str]:
    """The names of the modules that `targets` select, each once.

    A target of letters, digits, `_`, `-` and `.` is the end of their names, from a dot on. The class of a module, such as
    `Attention`, selects every layer in modules of this class; that of the model, all. Any other target is a regular expression
    of the end of names. The latter two select the layers that an adapter fits: linear ones, and convolutions without groups.
    Raises UserError if a target selects none.
    """
    modules = dict(model.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    found: dict[str, None] = {}
    lost = []
    for target in targets:
        plain = re.fullmatch(r"[\w.-]+", target) is not None
        names = [name for name in modules if name == target or (plain and name.endswith(f".{target}"))]
        if not names and target in classes:
            owners = [name and f"{name}." for name, module in modules.items() if type(module).__name__ == target]
            names = [name for name, module in modules.items() if name.startswith(tuple(owners)) and fits(module)]
        if not plain:
            end = _expression(target, option)
            names = [name for name, module in modules.items() if end.fullmatch(name) and fits(module)]
        found |= dict.fromkeys(names)
        lost += [] if names else [target]
    if lost:
        fix = _NAMES if option == "lora_targets" else f"correct {option}"
        raise UserError(f"no layer's name ends in {', '.join(lost)}", fix=fix)
    return list(found)


def _expression(target: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?:.*\.)?(?:{target})")
    except re.error as error:
        raise UserError(f"{target} in {option} is not a regular expression: {error}", fix=_NAMES) from None


def fits(module: nn.Module) -> bool:
    """Whether it is a layer that gets adapters: a linear one, or a convolution without groups."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def adapter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of adapters that train, in a model that has them."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parted(name) is not None}


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """What the product of the matrices of each layer is multiplied by, in a model with adapters."""
    modules = {layer: model.get_submodule(layer) for layer, _ in filter(None, map(parted, adapter_shapes(model)))}
    return {layer: float(module.scaling[ADAPTER]) for layer, module in modules.items()}  # type: ignore[index]
