"""Prodigy (arXiv:2306.06101) with the averaging of schedule-free optimizers (arXiv:2405.15682)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smalti.training import local_part
from smalti_optimizers.schedule_free import ScheduleFree
from smalti_optimizers.steps import own_ratio, stepped, sum_over_shards

_FIRST = 1e-6
"""The first estimate."""
_MOST = 2**0.25
"""The factor by which the estimate grows in one step at most."""


class ProdigyScheduleFree(ScheduleFree):
    """Schedule-free Adam whose learning rate is multiplied by an estimate of the distance from the first to the best weights.

    The estimate is one for all parameters. It is made of z, and not of `lr`, which is 1 or rises to it. The groups hold it as
    "d", and "d_numerator" and "weight_sum", from the first step on (see `ScheduleFreeAdamW`).
    State: "z", "exp_avg_sq", "s" (a sum of gradients) and "p0", the first weights. One host synchronisation a step.
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pairs = stepped(self)
        if not pairs:
            return
        leader = self.param_groups[0]
        distance, numerator = leader.get("d", _FIRST), leader.get("d_numerator", 0.0) * leader["betas"][1] ** 0.5
        shares: dict[int, float] = {}
        for group in self.param_groups:
            weight = (distance * group["lr"] / own_ratio(group)) ** 2
            total = group["weight_sum"] = group.get("weight_sum", 0.0) + weight
            shares[id(group)] = weight / total if total else 0.0
        sums = [self._step(parameter, group, distance, shares[id(group)]) for parameter, group in pairs]
        product, size = sum_over_shards(torch.stack(sums).sum(0), pairs[0][0]).cpu().tolist()
        product *= distance**2 / _FIRST
        if distance > _FIRST or product > 0:  # until it grows, steps away from the best weights do not count
            numerator += product
        if size > 0:
            distance = max(distance, min(distance * _MOST, numerator / size))
        for group in self.param_groups:
            group.update(d=distance, d_numerator=numerator)

    def _step(self, parameter: Tensor, group: dict[str, Any], distance: float, new: float) -> Tensor:
        """One step of a parameter; returns this rank's part of two sums, (2,): gradient x (p0 - z), |s|, as `Prodigy`."""
        state, beta2 = self.state[parameter], group["betas"][1]
        if not state:
            state["z"], state["p0"] = parameter.detach().clone(), parameter.detach().clone()
            state["exp_avg_sq"], state["s"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        square = local_part(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=distance**2 * (1 - beta2))
        product = (gradient * (local_part(state["p0"]) - local_part(state["z"]))).sum()
        total = local_part(state["s"]).mul_(beta2**0.5).add_(gradient, alpha=distance**2 / _FIRST)
        update = (gradient * distance).div_(square.sqrt().add_(distance * group["eps"]))
        self._move(parameter, update, group, distance * group["lr"], new)
        return torch.stack([product, total.abs().sum() * own_ratio(group)])
