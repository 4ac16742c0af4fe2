"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): an average of the weights instead of a falling learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smalti.training import local_part
from smalti_optimizers.steps import own_ratio, with_gradients


class ScheduleFree(torch.optim.Optimizer):
    """What schedule-free optimizers share: gradients are taken at weights y, between fast ones, z, and an average of them, x.

    y are the weights of the model, z is in the state, and x follows from both: y = (1 - beta1) z + beta1 x. So validation and
    exports, which use x, need no switch of the optimizer.
    """

    def average(self, weights: Mapping[str, Tensor]) -> OwnAverage:
        """The averaged weights, beside those that this optimizer steps."""
        betas = {parameter: group["betas"][0] for group in self.param_groups for parameter in group["params"]}
        return OwnAverage(self.state, {name: (weight, betas[weight]) for name, weight in weights.items()})

    def _move(self, parameter: Tensor, update: Tensor, group: dict[str, Any], rate: float, new: float) -> None:
        """One step of this rank's part of y and z; `new` is the share of the new z in the average. Changes `update`."""
        beta1, y, z = group["betas"][0], local_part(parameter), local_part(self.state[parameter]["z"])
        if group["weight_decay"]:
            update.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, new)
        y.sub_(update, alpha=rate * (1 - beta1 * (1 - new)))
        z.sub_(update, alpha=rate)


class OwnAverage:
    """`smalti.training.WeightAverage` of weights that a schedule-free optimizer steps: computed when they are wanted."""

    storage: Iterable[Tensor] = ()

    def __init__(self, state: Mapping[Tensor, Mapping[str, Tensor]], weights: Mapping[str, tuple[Tensor, float]]) -> None:
        self._state = state
        self._weights = weights

    @property
    def shadows(self) -> dict[str, Tensor]:
        """In host memory: there is room for z and y on the accelerator, and seldom for x as well."""
        with torch.no_grad():
            return {name: self._averaged(*each).to("cpu") for name, each in self._weights.items()}

    def update(self, step: int) -> None:
        """The optimizer has done it."""

    def wait(self, seconds: float | None = None) -> bool:
        return True

    def restart(self) -> None:
        """Before its first step x is y."""

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        kept = {name: local_part(weight).detach().clone() for name, (weight, _) in self._weights.items()}
        with torch.no_grad():
            try:
                for weight, beta1 in self._weights.values():
                    local_part(weight).copy_(local_part(self._averaged(weight, beta1)))
                yield
            finally:
                for name, (weight, _) in self._weights.items():
                    local_part(weight).copy_(kept[name])

    def _averaged(self, weight: Tensor, beta1: float) -> Tensor:
        """x, sharded like the weight."""
        fast = self._state.get(weight, {}).get("z")
        return weight.detach().clone() if fast is None else weight.detach().lerp(fast, 1 - 1 / beta1)


class ScheduleFreeAdamW(ScheduleFree):
    """AdamW without a first moment, at a constant learning rate. Elementwise, so each rank steps its part of a parameter.

    The average weights steps by the square of the largest rate so far. State: "z" and "exp_avg_sq". The groups hold "steps",
    "largest_rate" of the run and "weight_sum", which are added in the first step: what a group has from the beginning is a
    hyper-parameter, which a resumed run takes from its options.
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            steps = group["steps"] = group.get("steps", 0) + 1
            largest = group["largest_rate"] = max(group.get("largest_rate", 0.0), group["lr"] / own_ratio(group))
            total = group["weight_sum"] = group.get("weight_sum", 0.0) + largest**2
            for parameter in with_gradients(group):
                self._step(parameter, group, steps, largest**2 / total if total else 0.0)

    def _step(self, parameter: Tensor, group: dict[str, Any], steps: int, new: float) -> None:
        state, beta2 = self.state[parameter], group["betas"][1]
        if not state:
            state["z"], state["exp_avg_sq"] = parameter.detach().clone(), torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        square = local_part(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = gradient / square.div(1 - beta2**steps).sqrt_().add_(group["eps"])
        self._move(parameter, update, group, group["lr"], new)
