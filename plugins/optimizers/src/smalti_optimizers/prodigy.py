"""Prodigy (Mishchenko and Defazio 2023, arXiv:2306.06101): Adam that finds its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smalti.training import local_part
from smalti_optimizers.steps import own_ratio, sum_over_shards, with_gradients

_FIRST = 1e-6
"""The first estimate."""


class Prodigy(torch.optim.Optimizer):
    """Adam whose learning rate is multiplied by an estimate of the distance between the first and the best weights.

    `lr` is therefore 1, or a schedule from 1. Without bias correction and weight decay; the estimate does not depend on `lr`
    in its denominator, so that a warm-up does not disturb it.

    The groups hold the estimate "d", which only grows, and the running sum "d_numerator". They are added in the first step,
    because what a group has from the beginning is a hyper-parameter, which a resumed run takes from its options.
    State: "exp_avg", "exp_avg_sq", "s" (a sum of gradients) and "p0", the first weights. One host synchronisation a step.
    """

    def __init__(
        self, groups: list[dict[str, object]], *, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pairs = [(parameter, group) for group in self.param_groups for parameter in with_gradients(group)]
        if not pairs:
            return
        leader = self.param_groups[0]
        distance = new = leader.get("d", _FIRST)
        rate, beta3 = max(group["lr"] / own_ratio(group) for group in self.param_groups), leader["betas"][1] ** 0.5
        sums = [self._update(parameter, group, distance) for parameter, group in pairs]
        product, size = sum_over_shards(torch.stack(sums).sum(0), pairs[0][0]).cpu().tolist()
        numerator = beta3 * leader.get("d_numerator", 0.0) + distance / _FIRST * distance * rate * product
        if size > 0 and rate > 0:
            new = max(distance, numerator / size)
        for parameter, group in pairs:
            self._step_weights(parameter, group, distance, new)
        for group in self.param_groups:
            group.update(d=new, d_numerator=numerator)

    def _update(self, parameter: Tensor, group: dict[str, Any], distance: float) -> Tensor:
        """Move the state of a parameter; returns this rank's part of two sums, (2,): gradient x (p0 - weight), and |s|.

        Weights are in the unit of `own_ratio`, so that one estimate serves groups with several rates.
        """
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq", "s")})
            state["p0"] = parameter.detach().clone()
        assert parameter.grad is not None
        gradient, weight = local_part(parameter.grad), local_part(parameter)
        product = (gradient * (local_part(state["p0"]) - weight)).sum()
        local_part(state["exp_avg"]).mul_(beta1).add_(gradient, alpha=distance * (1 - beta1))
        local_part(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=distance**2 * (1 - beta2))
        total = local_part(state["s"]).mul_(beta2**0.5).add_(gradient, alpha=distance / _FIRST * distance)
        return torch.stack([product, total.abs().sum() * own_ratio(group)])

    def _step_weights(self, parameter: Tensor, group: dict[str, Any], distance: float, new: float) -> None:
        state = self.state[parameter]
        denominator = local_part(state["exp_avg_sq"]).sqrt().add_(new * group["eps"])
        local_part(parameter).addcdiv_(local_part(state["exp_avg"]), denominator, value=-distance * group["lr"])
