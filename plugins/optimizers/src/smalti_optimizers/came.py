"""CAME (Luo et al. 2023, arXiv:2307.02047): Adafactor with a momentum, and smaller steps where updates differ from it."""

from __future__ import annotations

import torch
from torch import Tensor

from smalti.training import local_part
from smalti_optimizers.factored import Factors, clipped_updates
from smalti_optimizers.steps import stepped, sum_together

_BETA3, _EPS = 0.9999, 1e-16


class CAME(torch.optim.Optimizer):
    """The momentum of Adafactor's updates, over the root of their mean squared distance to it, at an absolute learning rate.

    The distance is factored as the second moment is; a vector is stepped by its momentum alone. State: "exp_avg" in fp32,
    "row_var" and "col_var", or "variance" of a vector, and "row_res" and "col_res" of others.

    Two all-reduces a step. On any number of ranks steps are the same up to the rounding of sums; the second moments of
    parameters that are not factored as matrices are the same to the bit, for the same gradients.
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pairs = stepped(self)
        parameters = [parameter for parameter, _ in pairs]
        moments = [Factors(parameter, self.state[parameter], ("row_var", "col_var", "variance")) for parameter in parameters]
        updates = clipped_updates(parameters, moments, [1 - group["betas"][1] for _, group in pairs])
        distances: dict[Tensor, Factors] = {}
        parts: list[Tensor] = []
        for (parameter, group), update in zip(pairs, updates, strict=True):
            momentum = self._momentum(parameter).lerp_(update, 1 - group["betas"][0])
            if parameter.dim() > 1:
                distances[parameter] = Factors(parameter, self.state[parameter], ("row_res", "col_res", ""))
                parts.append(distances[parameter].add(update.sub_(momentum).square_(), 1 - _BETA3, _EPS))
        for distance, sums in zip(distances.values(), sum_together(parts, parameters), strict=True):
            distance.finish(sums, 1 - _BETA3, _EPS)
        for parameter, group in pairs:
            weight, update = local_part(parameter), self._momentum(parameter)
            if parameter in distances:
                update = distances[parameter].scale().mul_(update)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(update, alpha=group["lr"])

    def _momentum(self, parameter: Tensor) -> Tensor:
        """This rank's part, at first zeros."""
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        return local_part(state["exp_avg"])
