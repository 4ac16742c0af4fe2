"""Optimizers by name, and which parameters get which weight decay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from smalti.config import Config, OptimizerOptions
from smalti.errors import BrokenPlugin
from smalti.plugins import create, find_optimizer
from smalti.training.optim.ema import local_parts
from smalti.types import OptimizerEntry


def matrices(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are no vectors. For a model that is not wrapped: a wrapper may leave flat slices."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.dim() >= 2)


def parameter_groups(
    model: nn.Module, weight_decay: float, decayed: Collection[str], rates: Mapping[str, float] = {}
) -> list[dict[str, object]]:
    """The trained parameters as (name, parameter) pairs: the `decayed` ones, and those without weight decay (norms, biases).

    `rates` are those of `ModelFamily.learning_rates`; groups with one of their own follow, and have it as `peak_lr`.
    """
    groups: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            start = next(filter(name.startswith, rates), "")
            groups.setdefault((start, name not in decayed), []).append((name, parameter))
    return [
        {"params": groups[start, bare], "weight_decay": 0.0 if bare else weight_decay}
        | ({"peak_lr": rates[start]} if start else {})
        for start, bare in sorted(groups)
    ]


def build_registered(
    groups: list[dict[str, object]], config: Config, registry: Sequence[OptimizerEntry]
) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, from the registry."""
    options = config[OptimizerOptions]
    entry = find_optimizer(options.optimizer, registry)
    settings: dict[str, object] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
        "weight_decay": options.adam_weight_decay,
    }
    accepted = {key: value for key, value in settings.items() if key in entry.accepts}
    optimizer = create(entry, entry.factory, groups, lr=options.learning_rate, **accepted)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"{entry.kind} {entry.name!r} of {entry.origin}: {entry.factory} made a {type(optimizer).__name__}"
        raise BrokenPlugin(f"{what}, not a torch.optim.Optimizer", fix=entry.origin.workaround)
    return optimizer


class AdamW(torch.optim.AdamW):
    """AdamW in its fused form, which is the fastest on CPUs and on CUDA; of sharded parameters each rank steps its own part.

    It treats every number by itself, so parts give the same bits as the whole. As DTensors they would cost a step tens of
    milliseconds: torch computes again how all of them are spread whenever the learning rate has another value, and keeps each
    answer for good.
    """

    def __init__(self, groups: list[dict[str, object]], **settings: object) -> None:
        super().__init__(groups, fused=True, **settings)  # type: ignore[arg-type]

    def _init_group(self, group: dict[str, object], *found: list[Tensor]) -> bool:
        """torch fills these lists, with parameters, gradients and optimizer state, and steps what is in them afterwards."""
        has_complex = cast(bool, super()._init_group(group, *found))  # type: ignore[no-untyped-call]
        for tensors in found:
            tensors[:] = local_parts(tensors)
        return has_complex


def decouple_decay(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, made to shrink weights by rate times decay before each step, as AdamW does.

    For one that adds the decay to the gradient, where Adagrad would divide it away (Loshchilov and Hutter 2019). In between
    steps its groups say their `weight_decay` as before.
    """
    decays: list[float] = []

    def shrink(*_: object) -> None:
        decays[:] = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["weight_decay"] and stepped:
                with torch.no_grad():
                    torch._foreach_mul_(local_parts(stepped), 1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0

    def restore_decay(*_: object) -> None:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    optimizer.register_step_pre_hook(shrink)
    optimizer.register_step_post_hook(restore_decay)
    return optimizer
