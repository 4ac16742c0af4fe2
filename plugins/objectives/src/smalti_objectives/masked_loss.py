"""Masked and weighted losses: terms that read the columns `mask` and `loss_weight` of a batch.

Shapes: B batch, C channels, h, w latent size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from smalti import Config, ConfigError, Problem
from smalti.data import DatasetSpec
from smalti.diffusion import RandomColumn
from smalti.models import ModelFamily
from smalti.parallel import to_device
from smalti.training import Step, Term, lacks_base
from smalti_objectives.mask_options import MaskOptions


def mask_terms(config: Config, family: ModelFamily) -> list[Term]:
    """The terms of a run, of which those without a column in the batches do nothing."""
    terms: list[Term] = [LossWeight(), MaskedLoss(config)]
    if config[MaskOptions].prior_outside_mask:
        terms.append(PriorOutsideMask(config, lacks_base(config, family)))
    return terms


class LossWeight(Term):
    """Multiplies the loss of each image with its `loss_weight`. Other terms do it with `weighted`."""

    name = "loss_weight"

    def factor(self, step: Step) -> Tensor | None:
        weights = step.batch.columns.get("loss_weight")
        return None if weights is None else as_column(weights, step.targets[""])


class MaskedLoss(Term):
    """Multiplies the errors of each place with the weight that the mask gives it.

    With `mask_normalise` the loss of an image is sum(w l) / (C sum(w)), 0 where all weights are 0; without it mean(w l).
    """

    name = "mask"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._options = config[MaskOptions]

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        if any(spec.has_images and "mask" in spec.columns for spec in datasets):
            return ()
        given = [name for name in MaskOptions.model_fields if self._config.source(name) != "default"]
        return [f"{', '.join(given)} without effect: no dataset has masks (mask_path, mask_suffix, ...)"] if given else ()

    def factor(self, step: Step) -> Tensor | None:
        weights = place_weights(step, self._options)
        if weights is None or not self._options.mask_normalise:
            return weights
        means = as_column(weights.flatten(1).mean(1), weights)
        return torch.where(means > 0, weights / means, 0.0)


class PriorOutsideMask(Term):
    """Holds the model to what it predicts without its adapter, wherever the weight w of a place is less than 1.

    The loss of an image is sum((1 - w) l) / (C max(sum(1 - w), 1)), l being the errors against that prediction.
    """

    name = "prior_outside_mask"

    def __init__(self, config: Config, lacking: str) -> None:
        self._options = config[MaskOptions]
        self._lacking = lacking
        self.weight = self._options.prior_outside_mask

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        if self._lacking:
            message = f"prior_outside_mask needs the model without its adapter, and {self._lacking}"
            raise ConfigError([Problem(message=message, where="prior_outside_mask", fix="--model_type=lora, or leave it out")])
        return ()

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        return ("base",) if any("mask" in spec.columns for spec in datasets) else ()

    def loss(self, step: Step) -> Tensor | None:
        weights = place_weights(step, self._options)
        if weights is None or "base" not in step.predictions:
            return None
        outside, errors = 1 - weights, step.errors(against="base")
        sums = as_column(outside.flatten(1).sum(1).clamp(min=1), errors)
        return step.mean(weighted(step, errors * outside * (outside[0].numel() / sums)))


def weighted(step: Step, losses: Tensor) -> Tensor:
    """Losses (B, ...) of a term, those of each image multiplied with its `loss_weight`."""
    weights = step.batch.columns.get("loss_weight")
    return losses if weights is None else losses * as_column(weights, losses)


def as_column(values: Tensor, like: Tensor) -> Tensor:
    """(B,) values as (B, 1, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def place_weights(step: Step, options: MaskOptions) -> Tensor | None:
    """(B, 1, h, w) in fp32: how much each place counts, 1 in visits that do not use their mask; None without masks."""
    masks = step.batch.columns.get("mask")
    if masks is None:
        return None
    weights = (masks.float() / 255).clamp(min=options.mask_floor)
    if options.mask_probability == 1:
        return weights
    used = step.noise.column(step.batch.numbers, RandomColumn.MASK) < options.mask_probability
    return torch.where(as_column(to_device(used, weights.device), weights), weights, 1.0)
