"""At which noise levels a model is trained: quantile functions from uniform numbers to times.

A time runs from 0 (the clean image) to 1 (pure noise). Because each sampler is a quantile function, a sample's time is a
pure function of its own uniform number: the same whatever the batch, the rank or the number of ranks.

Shapes: B batch; every function here works element by element on a tensor of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from smalti.errors import UserError

Distribution = Literal["uniform", "logit_normal", "mode", "beta"]

MODE_SCALE_BOUNDS = (-1.0, 2.0 / (math.pi - 2.0))
"""Outside of these bounds the mode map is no longer monotonic (Esser et al. 2024, section 3.1)."""


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Move times towards noise (`shift` > 1) or towards the image (< 1); 0 and 1 stay where they are.

    s t / (1 + (s - 1) t): Esser et al. 2024, "Scaling Rectified Flow Transformers", equation 23 (timestep shifting).
    """
    return shift * times / (1 + (shift - 1) * times)


# --- quantile functions ---------------------------------------------------------------------------------------------


class Quantile(Protocol):
    """An increasing map from (0, 1) to the open interval of times. As text, its name and parameters."""

    def __call__(self, u: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every noise level equally often."""

    def __call__(self, u: Tensor) -> Tensor:
        return u

    def __str__(self) -> str:
        return "uniform"


@dataclass(frozen=True, kw_only=True)
class LogitNormal:
    """Mostly the middle: sigmoid(mean + std * N(0, 1)). A positive mean favours noise. Esser et al. 2024, equation 19."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))

    def __str__(self) -> str:
        return f"logit-normal({self.mean:g}, {self.std:g})"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Heavy tails: `scale` > 0 favours the middle, < 0 both ends, 0 is uniform. Esser et al. 2024, equation 20, in 1 - u."""

    scale: float = 1.29

    def __call__(self, u: Tensor) -> Tensor:
        return u - self.scale * (torch.sin(math.pi / 2 * u).square() - u)

    def __str__(self) -> str:
        return f"mode({self.scale:g})"


@dataclass(frozen=True)
class Beta:
    """Times from Beta(alpha, beta), both at least 1: a hump whose place is alpha / (alpha + beta).

    The inverse distribution function is read from a table of 4096 equal steps (error below 1e-3).
    """

    alpha: float = 2.0
    beta: float = 2.0

    @cached_property
    def _table(self) -> Tensor:
        middles = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
        density = middles ** (self.alpha - 1) * (1 - middles) ** (self.beta - 1)
        return torch.cat([torch.zeros(1, dtype=torch.float64), density.cumsum(0) / density.sum()])

    def __call__(self, u: Tensor) -> Tensor:
        table = self._table.to(u.device)
        wanted = u.double()
        right = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
        low, high = table[right - 1], table[right]
        return ((right - 1 + (wanted - low) / (high - low)) / (len(table) - 1)).to(u.dtype)

    def __str__(self) -> str:
        return f"beta({self.alpha:g}, {self.beta:g})"


# --- shift ----------------------------------------------------------------------------------------------------------


class Shift(Protocol):
    """How far times are moved towards noise at one image size."""

    def at(self, tokens: int) -> float:
        """The shift for an image of this many tokens (`image_tokens` of a model family)."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantShift:
    """The same shift at every size; 1 is none."""

    value: float = 1.0

    def at(self, tokens: int) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class ResolutionShift:
    """More shift for larger images, since the same noise hides less of them.

    exp(mu), or mu itself if not `exponential`. mu is linear in the number of tokens and known for two numbers of them. Without
    arguments: the published rule of Flux.
    """

    base_tokens: int = 256
    base_mu: float = 0.5
    max_tokens: int = 4096
    max_mu: float = 1.15
    exponential: bool = True

    def at(self, tokens: int) -> float:
        slope = (self.max_mu - self.base_mu) / (self.max_tokens - self.base_tokens)
        mu = self.base_mu + slope * (tokens - self.base_tokens)
        return math.exp(mu) if self.exponential else mu


# --- together -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimestepSampler:
    """A quantile function followed by a shift."""

    quantile: Quantile = field(default_factory=Uniform)
    shift: Shift = field(default_factory=ConstantShift)
    origin: str = ""
    """Where the shift comes from, as text; empty without one."""

    def __call__(self, u: Tensor, tokens: int) -> Tensor:
        """Times in (0, 1) for uniform numbers `u`, for images of this many tokens each."""
        return shift_times(self.quantile(u), self.shift.at(tokens))

    def describe(self, tokens: Collection[int]) -> str:
        """Distribution and shift as text, for these numbers of tokens: "uniform, shift 1.65 to 3.16 by image size (...)"."""
        if not self.origin:
            return str(self.quantile)
        ends = dict.fromkeys(f"{self.shift.at(count):.4g}" for count in (min(tokens), max(tokens)))
        size = "" if isinstance(self.shift, ConstantShift) else " by image size"
        return f"{self.quantile}, shift {' to '.join(ends)}{size} ({self.origin})"


def build_timesteps(
    *,
    distribution: Distribution = "uniform",
    sigmoid_mean: float = 0.0,
    sigmoid_scale: float = 1.0,
    shift: float | None = None,
    auto_shift: bool = False,
    native: Shift | None = None,
) -> TimestepSampler:
    """The sampler that the options describe. `auto_shift` replaces `shift` by one that grows with the image size.

    `native` is the family's own, for a `shift` that is not given. Raises `UserError` for values with which a sampler would not
    be a distribution over times.
    """
    quantile = _quantile(distribution, sigmoid_mean, sigmoid_scale)
    if auto_shift:
        return TimestepSampler(quantile=quantile, shift=ResolutionShift(), origin="flow_schedule_auto_shift")
    if shift is not None:
        if shift <= 0:
            raise UserError(f"a timestep shift of {shift:g} is not possible", fix="use a positive number; 1 means no shift")
        return TimestepSampler(quantile=quantile, shift=ConstantShift(value=shift), origin="flow_schedule_shift")
    if native is not None:
        return TimestepSampler(quantile=quantile, shift=native, origin="default of the family")
    return TimestepSampler(quantile=quantile)


def _quantile(distribution: Distribution, mean: float, std: float) -> Quantile:
    if distribution == "uniform":
        return Uniform()
    if distribution == "logit_normal":
        if std <= 0:
            raise UserError(f"a logit-normal scale of {std:g} is not possible", fix="use a positive number, such as 1")
        return LogitNormal(mean=mean, std=std)
    if distribution == "mode":
        return Mode()
    if distribution == "beta":
        return Beta()
    raise UserError(f"unknown timestep distribution '{distribution}'", fix="use uniform, logit_normal, mode or beta")
