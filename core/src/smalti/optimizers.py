"""Optimizers by name, and which parameters get which weight decay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import cast

import torch
from torch import Tensor, nn

from smalti.config import Config
from smalti.settings import OptimizerOptions
from smalti.strategy import find_optimizer
from smalti.types import OptimizerEntry


def matrices(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are no vectors. For a model that is not wrapped: a wrapper may leave flat slices."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.dim() >= 2)


def parameter_groups(model: nn.Module, weight_decay: float, decayed: Collection[str]) -> list[dict[str, object]]:
    """The trained parameters as (name, parameter) pairs: the `decayed` ones, and those without weight decay (norms, biases)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [pair for pair in trained if pair[0] in decayed], "weight_decay": weight_decay},
        {"params": [pair for pair in trained if pair[0] not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_registered(
    groups: list[dict[str, object]], config: Config, registry: Sequence[OptimizerEntry]
) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, from the registry."""
    options = config[OptimizerOptions]
    entry = find_optimizer(options.optimizer, registry)
    module, _, attribute = entry.factory.partition(":")
    settings: dict[str, object] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
        "weight_decay": options.adam_weight_decay,
    }
    accepted = {key: value for key, value in settings.items() if key in entry.accepts}
    optimizer = getattr(import_module(module), attribute)(groups, lr=options.learning_rate, **accepted)
    assert isinstance(optimizer, torch.optim.Optimizer), f"{entry.factory} must make a torch optimizer"
    return optimizer


def adamw(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    """AdamW in its fused form, which is the fastest on CPUs and on CUDA."""
    return torch.optim.AdamW(groups, fused=True, **settings)  # type: ignore[arg-type]


def sgd(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9, **settings)  # type: ignore[arg-type]


def muon(
    groups: list[dict[str, object]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) on matrices, AdamW on everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both.
    """
    matrices, rest = [], []
    for group in groups:
        pairs = cast(list[tuple[str, Tensor]], group["params"])
        matrices.append({**group, "params": [pair for pair in pairs if pair[1].dim() == 2]})
        rest.append({**group, "params": [pair for pair in pairs if pair[1].dim() != 2]})
    parts: list[torch.optim.Optimizer] = []
    if chosen := [group for group in matrices if group["params"]]:
        parts.append(torch.optim.Muon(chosen, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if chosen := [group for group in rest if group["params"]]:
        parts.append(torch.optim.AdamW(chosen, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))
    return Joined(parts)


class Joined(torch.optim.Optimizer):
    """Several optimizers over different parameters that step as one; they share one state and list of groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = tuple(parts)
        self.param_groups = groups
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)
