"""Adafactor at a learning rate that is taken as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from smalti import CheckpointError


class FixedRateAdafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern 2018) at an absolute learning rate: a step has about the size of the rate.

    As that of transformers is with `relative_step` and `scale_parameter` off. torch's multiplies the rate by the size of each
    weight, so that it does not train an adapter, which begins at zero. Of a matrix it keeps a row and a column of the second
    moment, under the names and in the shapes of torch's.
    """

    def __init__(self, groups: list[dict[str, object]], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "beta2_decay": -0.8, "eps": 1e-30, "clip": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(self.state[parameter], parameter.grad.float(), group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=group["lr"])

    @staticmethod
    def _update(state: dict[str, Tensor], gradient: Tensor, group: dict[str, float]) -> Tensor:
        """The gradient over the root of its second moment, with a root mean square of at most `clip`."""
        rows, columns = gradient.shape[-2:-1], gradient.shape[-1:]
        if not state:
            state["step"] = torch.tensor(0.0)
            if rows:
                state["row_var"] = gradient.new_zeros(*gradient.shape[:-1], 1)
                state["col_var"] = gradient.new_zeros(*gradient.shape[:-2], 1, *columns)
            else:
                state["variance"] = torch.zeros_like(gradient)
        state["step"] += 1
        new = state["step"].item() ** group["beta2_decay"]
        square = gradient.square().add_(group["eps"])
        if rows:
            row = state["row_var"].lerp_(square.mean(-1, keepdim=True), new)
            column = state["col_var"].lerp_(square.mean(-2, keepdim=True), new)
            scale = (row / row.mean(-2, keepdim=True)).rsqrt_() * column.rsqrt()
        else:
            scale = state["variance"].lerp_(square, new).rsqrt()
        update = scale.mul_(gradient)
        return update.div_((update.norm() / update.numel() ** 0.5 / group["clip"]).clamp_(min=1.0))

    def check_saved(self, name: str) -> None:
        """Refuse to continue from the state of the optimizer of this class name, where that is torch's Adafactor.

        The same learning rate would make steps that are hundreds of times as large. Raises CheckpointError.
        """
        if name == torch.optim.Adafactor.__name__:
            raise CheckpointError(
                "the checkpoint is of a run whose Adafactor scaled the learning rate by the size of each weight, and "
                "--optimizer=adafactor takes it as it is",
                fix="--optimizer=adafactor_scaled resumes it; or start a new run in a new --output_dir",
            )
