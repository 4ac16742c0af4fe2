"""The weight of each noise level in the loss.

Shapes: B batch; times and weights (B,).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from smalti.diffusion.objective import Objective, RectifiedFlow
from smalti.errors import UserError

FlowWeighting = Literal["none", "sigma_sqrt", "cosmap"]
Weighting = Callable[[Tensor], Tensor]
"""Times of an objective (B,) -> the factor for each sample's loss (B,), fp32."""

_SMALLEST_SIGMA = 1e-3


def build_weighting(
    objective: Objective, *, snr_gamma: float | None = None, flow_weighting: FlowWeighting = "none"
) -> Weighting:
    """The weighting that the options describe; without any, every sample counts the same.

    `snr_gamma` (None or 0: off) is min-SNR and belongs to DDPM, `flow_weighting` to rectified flow; one that does not fit
    the objective is a `UserError`.
    """
    flow = isinstance(objective, RectifiedFlow)
    if snr_gamma:
        if flow:
            raise UserError("snr_gamma has no meaning for rectified flow", fix="remove it, or see flow_weighting")
        return min_snr(objective, snr_gamma)
    if flow_weighting == "none":
        return unweighted
    if not flow:
        raise UserError(f"flow_weighting={flow_weighting} needs rectified flow", fix="remove it, or see snr_gamma")
    if flow_weighting == "sigma_sqrt":
        return sigma_sqrt
    if flow_weighting == "cosmap":
        return cosmap
    raise UserError(f"unknown flow weighting '{flow_weighting}'", fix="use none, sigma_sqrt or cosmap")


def unweighted(t: Tensor) -> Tensor:
    """Ones."""
    return torch.ones_like(t, dtype=torch.float32)


def min_snr(objective: Objective, gamma: float) -> Weighting:
    """Keeps easy, almost clean samples from dominating the gradient: min(SNR, gamma) in terms of x0.

    Divided by SNR for epsilon and by SNR + 1 for v_prediction (Hang et al. 2023, "Efficient Diffusion Training via Min-SNR
    Weighting Strategy", section 3.4); 5 is the paper's gamma.
    """
    if gamma <= 0:
        raise UserError(f"snr_gamma={gamma:g} is not possible", fix="use a positive number, such as 5")

    def weigh(t: Tensor) -> Tensor:
        snr = objective.snr(t)
        capped = snr.clamp(max=gamma)
        if objective.prediction == "epsilon":
            return capped / snr
        if objective.prediction == "v_prediction":
            return capped / (snr + 1)
        return capped

    return weigh


def sigma_sqrt(t: Tensor) -> Tensor:
    """1 / t^2, with times below 0.001 counted as 0.001 so that one sample cannot ruin a step."""
    return t.float().clamp(min=_SMALLEST_SIGMA).pow(-2)


def cosmap(t: Tensor) -> Tensor:
    """2 / (pi (1 - 2t + 2t^2)): the density of a cosine schedule (Esser et al. 2024, equation 21)."""
    t = t.float()
    return 2 / (math.pi * (1 - 2 * t + 2 * t.square()))
