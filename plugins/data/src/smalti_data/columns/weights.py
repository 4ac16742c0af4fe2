"""The column `loss_weight`: the factor of the loss of each image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smalti.data import Catalog, Column, DatasetSpec, Framing, Sample
from smalti_data.columns.keys import WeightKeys


def open_weight(spec: DatasetSpec, keys: WeightKeys, catalog: Catalog, specs: Sequence[DatasetSpec]) -> LossWeight:
    """The column of a dataset."""
    return LossWeight(keys.loss_weight)


class LossWeight(Column):
    """The same weight for all images of a dataset: a number without dimensions, fp32."""

    def __init__(self, weight: float) -> None:
        self._weight = weight

    def read(self, sample: Sample, framing: Framing) -> Tensor:
        return torch.tensor(self._weight, dtype=torch.float32)

    def neutral(self, framing: Framing) -> Tensor:
        return torch.tensor(1.0)
