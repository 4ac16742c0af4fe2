"""Lion (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smalti.training import grouped, local_parts
from smalti_optimizers.steps import count_step, with_gradients


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum, with decoupled weight decay. Elementwise, so each rank steps its part of a parameter.

    State: "exp_avg", and "step" for DeepSpeed's Lion, which needs it to continue.
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = with_gradients(group)
            for indices in grouped([parameter.nbytes for parameter in parameters]):
                self._update([parameters[index] for index in indices], group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        for parameter in parameters:
            state = self.state[parameter]
            count_step(state)
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
        weights = local_parts(parameters)
        gradients = local_parts([parameter.grad for parameter in parameters if parameter.grad is not None])
        averages = local_parts([self.state[parameter]["exp_avg"] for parameter in parameters])
        updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        if decay:
            torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_sub_(weights, updates, alpha=rate)
        torch._foreach_lerp_(averages, gradients, 1 - beta2)
