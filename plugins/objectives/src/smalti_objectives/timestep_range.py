"""A range of noise levels: the distribution of times, truncated at both ends.

Inside the range, times keep their frequencies relative to one another. Clamping would train the ends most, and a linear map
would move the shape: the uniform numbers are truncated instead, by the inverse of the quantile function.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smalti.diffusion import TimestepSampler
from smalti.training import Term


class TimestepRange(Term):
    """Trains the noise levels between two fractions of the way to noise, after the shift."""

    name = "timestep_range"

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def timesteps(self, sampler: TimestepSampler) -> TimestepSampler:
        return TruncatedSampler(sampler=sampler, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class TruncatedSampler(TimestepSampler):
    """The times of another sampler between `low` and `high`."""

    sampler: TimestepSampler
    low: float
    high: float
    _ends: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The uniform numbers that become the ends of the range, by the number of tokens of an image."""

    def __call__(self, u: Tensor, tokens: int) -> Tensor:
        if tokens not in self._ends:
            self._ends[tokens] = self._share_below(self.low, tokens), self._share_below(self.high, tokens)
        first, last = self._ends[tokens]
        times = self.sampler(first + (last - first) * u.double(), tokens)
        return times.clamp(self.low, self.high).to(u.dtype)  # what rounding put outside

    def describe(self, tokens: Collection[int]) -> str:
        return f"{self.sampler.describe(tokens)}, of these the times from {self.low:g} to {self.high:g}"

    def _share_below(self, time: float, tokens: int) -> float:
        """The share of times below this one for images of this many tokens, by bisection: every quantile function increases."""
        if time in (0, 1):
            return float(time)
        below, above = 0.0, 1.0
        for _ in range(53):
            middle = (below + above) / 2
            found = self.sampler(torch.tensor([middle], dtype=torch.float64), tokens).item()
            below, above = (middle, above) if found < time else (below, middle)
        return below
