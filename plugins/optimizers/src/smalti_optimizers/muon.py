"""Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from smalti.training import AdamW


def muon(
    groups: list[dict[str, object]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) on matrices, AdamW on everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so that one learning rate serves both.
    """
    matrices, rest = [], []
    for group in groups:
        pairs = cast(list[tuple[str, Tensor]], group["params"])
        matrices.append({**group, "params": [pair for pair in pairs if pair[1].dim() == 2]})
        rest.append({**group, "params": [pair for pair in pairs if pair[1].dim() != 2]})
    parts: list[torch.optim.Optimizer] = []
    if chosen := [group for group in matrices if group["params"]]:
        parts.append(torch.optim.Muon(chosen, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if chosen := [group for group in rest if group["params"]]:
        parts.append(AdamW(chosen, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
    return Joined(parts)


class Joined(torch.optim.Optimizer):
    """Several optimizers over different parameters that step as one; they share one state and list of groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = tuple(parts)
        self.param_groups = groups
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)
