"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235)."""

from __future__ import annotations

import torch

from smalti import CheckpointError
from smalti.training import local_part
from smalti_optimizers.factored import Factors, clipped_updates
from smalti_optimizers.steps import count_step, stepped


class FixedRateAdafactor(torch.optim.Optimizer):
    """Adafactor at an absolute learning rate: a step has about the size of the rate.

    As that of transformers is with `relative_step` and `scale_parameter` off. torch's multiplies the rate by the size of each
    weight, so that it does not train an adapter, which begins at zero. The state has the names of torch's: "step", and
    "row_var" and "col_var", or "variance" of a vector. Convolutions are factored as matrices of their output channels.

    One all-reduce a step. On any number of ranks steps are the same up to the rounding of sums; the state of parameters that
    are not factored as matrices is the same to the bit, for the same gradients.
    """

    def __init__(self, groups: list[dict[str, object]], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pairs = stepped(self)
        parameters = [parameter for parameter, _ in pairs]
        states = [self.state[parameter] for parameter in parameters]
        new = [count_step(state) ** -0.8 for state in states]
        factors = [Factors(*each, ("row_var", "col_var", "variance")) for each in zip(parameters, states, strict=True)]
        updates = clipped_updates(parameters, factors, new)
        for (parameter, group), update in zip(pairs, updates, strict=True):
            weight = local_part(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(update, alpha=group["lr"])

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
