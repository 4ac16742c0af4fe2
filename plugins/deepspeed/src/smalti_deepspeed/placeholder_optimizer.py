"""What stands in for an optimizer that DeepSpeed will build from its configuration."""

from __future__ import annotations

import torch


def placeholder(groups: list[dict[str, object]], *, lr: float, **settings: object) -> torch.optim.Optimizer:
    """Holds the groups of parameters until DeepSpeed makes the optimizer of its configuration for them. It takes no step."""
    return torch.optim.SGD(groups, lr=lr)
