"""StableAdamW (Wortsman et al. 2023, arXiv:2304.13013): AdamW with the update clipping of Adafactor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smalti.training import local_part
from smalti_optimizers.steps import count_step, sum_over_shards, with_gradients


class StableAdamW(torch.optim.Optimizer):
    """AdamW with a learning rate that is divided by the root mean square of gradient / sqrt(second moment), if that is above 1.

    The mean is that of one parameter, over the parts of all ranks. So a gradient that is suddenly large makes no large step.
    State: "exp_avg" and "exp_avg_sq", with the bias correction in them, and "step".
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if parameters := with_gradients(group):
                means = torch.stack([self._update_moments(parameter, group) / parameter.numel() for parameter in parameters])
                ratios = sum_over_shards(means, parameters[0]).sqrt_()
                for parameter, rate in zip(parameters, group["lr"] / ratios.clamp_(min=1.0), strict=True):
                    self._step_weights(parameter, rate, group)

    def _update_moments(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Move the moments of a parameter; returns the sum of this rank's squared gradient / second moment, a scalar."""
        state, (beta1, beta2), eps = self.state[parameter], group["betas"], group["eps"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        step = count_step(state)
        assert parameter.grad is not None
        gradient, square = local_part(parameter.grad), local_part(state["exp_avg_sq"])
        local_part(state["exp_avg"]).lerp_(gradient, (1 - beta1) / (1 - beta1**step))
        new = (1 - beta2) / (1 - beta2**step)
        square.mul_(1 - new).addcmul_(gradient, gradient, value=new)
        return gradient.square().div_(square.clamp(min=eps**2)).sum()

    def _step_weights(self, parameter: Tensor, rate: Tensor, group: dict[str, float]) -> None:
        """One step of this rank's part with a learning rate that is a scalar on its device."""
        weight, state = local_part(parameter), self.state[parameter]
        update = local_part(state["exp_avg"]) / local_part(state["exp_avg_sq"]).sqrt().add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.sub_(update.mul_(rate))
