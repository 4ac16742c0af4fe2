"""Regularisation data: images on which an adapter is to change nothing.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from smalti import Config, ConfigError, Problem
from smalti.data import DatasetSpec
from smalti.models import ModelFamily
from smalti.parallel import to_device
from smalti.training import Step, Term, lacks_base
from smalti_objectives.masked_loss import as_column


class Regularisation(Term):
    """Trains samples of datasets with `is_regularisation_data` towards the model without its adapter."""

    name = "regularisation"

    def __init__(self, config: Config, family: ModelFamily) -> None:
        self.lacking = lacks_base(config, family)

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        chosen = [spec.id for spec in datasets if spec.is_regularisation_data and spec.dataset_type == "image"]
        if chosen and self.lacking:
            message = f"is_regularisation_data trains towards the model without the adapter, and {self.lacking}"
            fix = "set model_type to lora, remove is_regularisation_data, or set disabled: true for this dataset"
            raise ConfigError([Problem(message=message, where=f"dataset {name!r}", fix=fix) for name in chosen])
        return ()

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        return ("base",) if any(spec.is_regularisation_data for spec in datasets) else ()

    def target(self, step: Step, target: Tensor) -> Tensor:
        if "base" not in step.predictions:
            return target
        chosen = torch.tensor([spec.is_regularisation_data for spec in step.batch.datasets])
        return torch.where(
            as_column(to_device(chosen, target.device), target), step.predictions["base"].float(), target.float()
        )
