"""Preferences: of two images, a model learns to tell the better one from the worse one (Wallace et al. 2023, "Diffusion-DPO").

The loss of a pair is -log sigmoid(-beta / 2 w (e(x+) - e0(x+) - e(x-) + e0(x-))), where e(x) is the mean error of the adapted
model on a noisy image, e0(x) that of the model without its adapter, and w the weight of the noise level. Both images have the
same noise at the same time. It is the same for rectified flow, where it is known as Flow-DPO, and denoising diffusion.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from smalti import Config, ConfigError, Problem
from smalti.data import DatasetSpec
from smalti.models import ModelFamily
from smalti.parallel import to_device
from smalti.training import POLICY, Step, Term, lacks_base
from smalti_objectives.columns.images import check_encoder
from smalti_objectives.masked_loss import MaskedLoss, as_column, weighted
from smalti_objectives.options import ObjectivesOptions

REJECTED = "rejected"
"""The column of the images that are worse than those of the dataset."""


class Preference(Term):
    """That loss, in place of the denoising loss, for images of the datasets that have rejected ones."""

    name = "dpo"

    def __init__(self, config: Config, family: ModelFamily) -> None:
        self._beta = config[ObjectivesOptions].dpo_beta or 0.0
        self._mask = MaskedLoss(config)
        self._lacking = lacks_base(config, family)
        self._no_encoder = check_encoder(config, family)

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        if self._lacking:
            message = f"dpo_beta compares with the model without its adapter, and {self._lacking}"
            problem = Problem(message=message, where="dpo_beta", fix="--model_type=lora, or leave it out", option="dpo_beta")
            raise ConfigError([problem])
        if not any(spec.dataset_type == "image" and REJECTED in spec.columns for spec in datasets):
            message = "dpo_beta needs pairs of images, and no dataset has rejected ones"
            fix = 'give a dataset the key "rejected_path"'
            raise ConfigError([Problem(message=message, where="dpo_beta", fix=fix, option="dpo_beta")])
        if self._no_encoder is not None:
            raise ConfigError([self._no_encoder])
        return ()

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        paired = any(REJECTED in spec.columns for spec in datasets)
        return ("base", f"{POLICY}|latents={REJECTED}", f"base|latents={REJECTED}") if paired else ()

    def factor(self, step: Step) -> Tensor | None:
        return 1 - as_column(_paired(step), step.targets[""])

    def loss(self, step: Step) -> Tensor | None:
        if f"{POLICY}|latents={REJECTED}" not in step.predictions:
            return None
        better, worse = (self._gain(step, f"|latents={REJECTED}" if rejected else "") for rejected in (False, True))
        losses = -F.logsigmoid(-self._beta / 2 * step.weights * (better - worse))
        return weighted(step, losses * _paired(step)).mean()

    def _gain(self, step: Step, latents: str) -> Tensor:
        """(B,): by how much the mean error with the adapter is above that without it."""
        errors = step.errors(f"{POLICY}{latents}") - step.errors(f"base{latents}")
        factor = self._mask.factor(step)
        return (errors if factor is None else errors * factor).flatten(1).mean(1)


def _paired(step: Step) -> Tensor:
    """(B,): 1 for images with a rejected one, else 0."""
    return to_device(torch.tensor([float(REJECTED in spec.columns) for spec in step.batch.datasets]), step.t.device)
