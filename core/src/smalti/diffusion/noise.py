"""Random numbers that belong to samples, not to ranks.

Shapes: B samples, K numbers per sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smalti.system import derive_seed, uniform_single


class SampleNoise:
    """Noise and uniform numbers as a pure function of (seed, sample number).

    A sample's number is unique over the run (say, its position in the order of all samples), so the same sample gets the
    same noise and the same time whichever rank asks for it, in whatever batch, before or after a resume. Uniform numbers are
    on the CPU; noise is made on `device`, and its values differ between kinds of device.
    """

    def __init__(self, seed: int, device: str | torch.device = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device)

    def normal(self, numbers: Sequence[int], shape: Sequence[int]) -> Tensor:
        """(B, *shape) unit normal, fp32, independent for each of the B numbers."""
        noise = torch.empty((len(numbers), *shape), device=self.device)
        for row, number in zip(noise, numbers, strict=True):
            self._generator.manual_seed(derive_seed(self.seed, number, 0))
            row.normal_(generator=self._generator)
        return noise

    def uniform(self, numbers: Sequence[int], count: int = 1) -> Tensor:
        """(B, K) numbers strictly between 0 and 1, fp32, K = `count`; the first ones do not depend on `count`."""
        # 23 bits and a half: every value is exact in fp32 and none is 0 or 1, where quantile functions have no value.
        rows = [[uniform_single(derive_seed(self.seed, number, 1, k)) for k in range(count)] for number in numbers]
        return torch.tensor(rows, dtype=torch.float32).view(len(numbers), count)
