"""DeepSpeed's own optimizers, as the core builds them before DeepSpeed does."""

from __future__ import annotations

import torch


def stand_in(groups: list[dict[str, object]], *, lr: float, **settings: object) -> torch.optim.Optimizer:
    """Holds the groups of parameters until DeepSpeed makes the optimizer of its configuration for them. It takes no step."""
    return torch.optim.SGD(groups, lr=lr)
