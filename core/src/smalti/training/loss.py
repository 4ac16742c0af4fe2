"""From a micro-batch to its loss: what all families and backends have in common.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from smalti.config import Config, DataOptions, ObjectiveOptions, RunOptions
from smalti.data import Bucket, MicroBatch
from smalti.diffusion import (
    Conditioning,
    Distribution,
    Objective,
    RectifiedFlow,
    SampleNoise,
    TimestepSampler,
    Weighting,
    build_objective,
    build_timesteps,
    build_weighting,
)
from smalti.models import ModelFamily, latents_of
from smalti.parallel import Parallel, to_device


def objective_of(config: Config, family: ModelFamily) -> Objective:
    """What the run trains: the prediction and the noise schedule of the family, or those that the options say.

    The loss is computed with it, evaluations measure it, and `SampleRequest` hands it to the family to sample with.
    """
    options = config[ObjectiveOptions]
    return build_objective(
        options.prediction_type or family.prediction,
        native=family.prediction,
        loss_type=options.loss_type,
        huber_c=options.huber_c,
        huber_schedule=options.huber_schedule,
        beta_schedule=options.beta_schedule or family.beta_schedule,
        rescale_betas_zero_snr=options.rescale_betas_zero_snr,
    )


@dataclass(frozen=True, kw_only=True)
class DenoisingLoss:
    """Add noise, predict, compare. Random numbers depend on the numbers of samples alone, not on ranks or resumes."""

    family: ModelFamily
    objective: Objective
    timesteps: TimestepSampler
    weighting: Weighting
    noise: SampleNoise
    dropout: float
    unconditional: Conditioning | None = None
    """One row: the conditioning of the empty prompt, if texts were encoded before training."""
    without_adapter: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    """Within it the model is the one without its adapter; None where a family cannot do that. For regularisation data."""

    def __call__(self, model: nn.Module, batch: MicroBatch, parallel: Parallel) -> Tensor:
        """The mean loss over the samples of one micro-batch: a scalar with a gradient."""
        with torch.no_grad():
            latents = latents_of(self.family, batch.pixels, batch.latents)
            noise = self.noise.normal(batch.numbers, latents.shape[1:])
            chance = self.noise.uniform(batch.numbers, 2)
            tokens = self.family.image_tokens(batch.bucket.width, batch.bucket.height)
            t = to_device(self.objective.times(self.timesteps(chance[:, 0], tokens)), latents.device)
            noisy = self.objective.add_noise(latents, noise, t)
            texts = self._caption_conditioning(batch, dropped=chance[:, 1] < self._dropout(batch))
            width, height = batch.bucket.width, batch.bucket.height
            conditioning = texts | self.family.encode_size_conditioning(batch.size_conditioning, width, height)
        target = self.objective.target(latents, noise, t)
        if batch.has_regularisation:
            base = self._base_prediction(model, noisy, t, conditioning, parallel)
            chosen = to_device(torch.tensor(batch.regularisation), latents.device).view(-1, *[1] * (target.ndim - 1))
            target = torch.where(chosen, base.float(), target.float())
        with parallel.autocast():
            prediction = self.family.forward(model, noisy, self.objective.timesteps(t), conditioning)
        losses = self.objective.compare(prediction, target, t)
        return (losses * self.weighting(t)).mean()

    def _base_prediction(
        self, model: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning, parallel: Parallel
    ) -> Tensor:
        """What the model predicts without its adapter. Each rank has to call it: the model may be sharded."""
        assert self.without_adapter is not None, "checked before the launch"
        with torch.no_grad(), self.without_adapter(model), parallel.autocast():
            return self.family.forward(model, noisy, self.objective.timesteps(t), conditioning)

    def describe_timesteps(self, buckets: Iterable[Bucket]) -> str:
        """Which noise levels images of these sizes are trained at, in words: "logit-normal(0, 1), shift 3 (...)"."""
        return self.timesteps.describe({self.family.image_tokens(bucket.width, bucket.height) for bucket in buckets})

    def _dropout(self, batch: MicroBatch) -> float | Tensor:
        """The share of visits without a caption: one for all, or for each image where its dataset has another (host memory)."""
        given = batch.caption_dropout
        if all(share is None for share in given):
            return self.dropout
        return torch.tensor([self.dropout if share is None else share for share in given])

    def _caption_conditioning(self, batch: MicroBatch, dropped: Tensor) -> Conditioning:
        """The conditioning of the captions, and of the empty prompt where a caption is `dropped` (in host memory)."""
        if batch.conditioning is None or self.unconditional is None:
            captions = ["" if drop else caption for caption, drop in zip(batch.captions, dropped.tolist(), strict=True)]
            return self.family.encode_captions(captions)
        unconditional = self.unconditional
        dropped = to_device(dropped, self.noise.device)
        return {
            name: torch.where(dropped.view(-1, *[1] * (rows.ndim - 1)), unconditional[name], rows)
            for name, rows in batch.conditioning.items()
        }


def default_distribution(objective: Objective) -> Distribution:
    """How often each noise level is trained unless the user says so.

    Rectified flow: logit-normal, as Stable Diffusion 3 was trained (Esser et al. 2024, section 3.1), and Sana, Lumina Image 2.0
    and Z-Image after it. Denoising diffusion: uniform, as in Ho et al. 2020.
    """
    return "logit_normal" if isinstance(objective, RectifiedFlow) else "uniform"


def denoising_loss(
    config: Config,
    family: ModelFamily,
    device: str,
    unconditional: Conditioning | None = None,
) -> DenoisingLoss:
    """The loss that the options describe. Raises UserError for options that do not go together.

    `unconditional` is the row of the empty prompt, on the device; None if texts are encoded in every step.
    """
    options = config[ObjectiveOptions]
    objective = objective_of(config, family)
    return DenoisingLoss(
        family=family,
        objective=objective,
        timesteps=build_timesteps(
            distribution=options.timestep_distribution or default_distribution(objective),
            sigmoid_mean=options.flow_sigmoid_mean,
            sigmoid_scale=options.flow_sigmoid_scale,
            shift=options.flow_schedule_shift,
            auto_shift=options.flow_schedule_auto_shift,
            native=family.flow_shift,
        ),
        weighting=build_weighting(objective, snr_gamma=options.snr_gamma, flow_weighting=options.flow_weighting),
        noise=SampleNoise(config[RunOptions].seed, device),
        dropout=config[DataOptions].caption_dropout_probability,
        unconditional=unconditional,
        without_adapter=partial(family.adapter_strength, strength=0.0) if family.scales_adapter else None,
    )
