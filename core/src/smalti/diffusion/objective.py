"""What is trained: how noise is added at a time, what the model predicts, and the loss.

Two processes, both written x_t = alpha(t) x0 + sigma(t) e with x0 the latents and e unit normal noise:

- `Ddpm`: variance preserving, 1000 discrete steps; predictions epsilon, v_prediction, sample.
- `RectifiedFlow`: a straight line from image to noise; predictions flow_matching, sample.

Random numbers belong to samples, not to ranks. Shapes: B batch, latents (B, C, h, w) or any (B, ...); times (B,); K numbers
per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor

from smalti.errors import UserError
from smalti.system import derive_seed, uniform_single

Prediction = Literal["epsilon", "v_prediction", "sample", "flow_matching"]
Conditioning = dict[str, Tensor]
"""What a model is given beside the noisy latents, by name; each with a leading dimension of B."""
LossType = Literal["l2", "huber", "smooth_l1"]
HuberSchedule = Literal["constant", "snr", "exponential"]
BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]

STEPS = 1000
"""Timesteps handed to models run from 0 to this number, as diffusers' models expect."""

PUBLISHED_BETAS: dict[str, tuple[float, float]] = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}
"""Where the schedules that have a start and an end have them."""


class Objective(Protocol):
    """One process with one kind of prediction. `t` is always (B,), made by `times`; results are fp32 but where stated."""

    prediction: Prediction

    def times(self, u: Tensor) -> Tensor:
        """Fractions of the way to noise in (0, 1], as a timestep sampler returns them -> this process's times."""
        ...

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) of x_t = alpha x0 + sigma e, each (B,)."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Noisy latents at `t`, in the dtype of `latents`."""
        ...

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """(B, ...): the raw prediction that has no loss."""
        ...

    def errors(self, prediction: Tensor, target: Tensor, t: Tensor) -> Tensor:
        """(B, ...): the loss of each element of raw predictions against other ones, not weighted."""
        ...

    def compare(self, prediction: Tensor, target: Tensor, t: Tensor) -> Tensor:
        """(B,): the mean of the `errors` of each sample."""
        return self.errors(prediction, target, t).flatten(1).mean(1)

    def timesteps(self, t: Tensor) -> Tensor:
        """The timesteps that the model gets: (B,) in [0, 1000]."""
        ...

    def snr(self, t: Tensor) -> Tensor:
        """Signal-to-noise ratio (alpha / sigma)^2."""
        ...

    def to_x0_and_noise(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, noise) of which `noisy` is made, by a raw prediction. Velocity is noise - x0."""
        ...


def build_objective(
    prediction: Prediction,
    *,
    native: Prediction = "flow_matching",
    loss_type: LossType = "l2",
    huber_c: float = 0.1,
    huber_schedule: HuberSchedule = "constant",
    beta_schedule: BetaSchedule = "scaled_linear",
    beta_start: float | None = None,
    beta_end: float | None = None,
    rescale_betas_zero_snr: bool = False,
) -> Objective:
    """The objective for a prediction: flow_matching means rectified flow, epsilon and v_prediction mean DDPM.

    `sample` exists in both; it stays with the process of `native`, the family's own prediction (flow, if that is `sample`
    too). The beta arguments matter for DDPM only; None is the published value for the schedule. Raises `UserError` for
    combinations that cannot be trained.
    """
    if loss_type not in ("l2", "huber", "smooth_l1"):
        raise UserError(f"unknown loss type '{loss_type}'", fix="use l2, huber or smooth_l1")
    if loss_type != "l2" and huber_c <= 0:
        raise UserError(f"a Huber threshold of {huber_c:g} is not possible", fix="use a positive number, such as 0.1")
    cost = Cost(kind=loss_type, threshold=huber_c, schedule=huber_schedule)
    if prediction == "flow_matching" or (prediction == "sample" and native in ("flow_matching", "sample")):
        return RectifiedFlow(prediction, cost=cost)
    betas = beta_table(beta_schedule, start=beta_start, end=beta_end)
    return Ddpm(prediction, betas=zero_terminal_snr(betas) if rescale_betas_zero_snr else betas, cost=cost)


# --- loss ---------------------------------------------------------------------------------------------------------


class Cost:
    """A difference between prediction and target as one number per element.

    `huber` is the pseudo-Huber 2c (sqrt(d^2 + c^2) - c): d^2 for small differences, 2c|d| for large ones; `smooth_l1` is
    the same divided by c (Charbonnier et al. 1997; for diffusion: Song and Dhariwal 2023, section 3.3).

    The threshold c is the same at all noise levels, or falls from 1 where there is no noise towards `threshold` where there is
    nothing else: with the ratio of noise to signal (snr), or exponentially with the timestep (Khrapov et al. 2024,
    "Improving Diffusion Models's Data-Corruption Resistance using Scheduled Pseudo-Huber Loss").
    """

    def __init__(self, *, kind: LossType = "l2", threshold: float = 0.1, schedule: HuberSchedule = "constant") -> None:
        self.kind = kind
        self.threshold = threshold
        self.schedule = schedule

    def thresholds(self, objective: Objective, t: Tensor) -> Tensor | None:
        """The threshold of each sample, (B,); None if all have the same, or if there is none."""
        if self.kind == "l2" or self.schedule == "constant":
            return None
        if self.schedule == "snr":
            return (1 - self.threshold) / (1 + objective.snr(t).rsqrt()).square() + self.threshold
        return self.threshold ** (objective.timesteps(t) / STEPS)

    def __call__(self, prediction: Tensor, target: Tensor, thresholds: Tensor | None = None) -> Tensor:
        """(B, ...), in fp32. Without `thresholds`, all samples have the constant one."""
        square = (prediction.float() - target.float()).square()
        if self.kind != "l2":
            c = self.threshold if thresholds is None else _per_sample(thresholds, square)
            # As (root - c), without the digits that this difference would lose for small errors.
            square = 2 * square / ((square + c * c).sqrt() + c) * (c if self.kind == "huber" else 1.0)
        return square


# --- rectified flow -------------------------------------------------------------------------------------------------


class RectifiedFlow(Objective):
    """x_t = (1 - t) x0 + t e, times in (0, 1] (Liu et al. 2022; Lipman et al. 2022).

    `flow_matching` predicts the velocity e - x0. `sample` predicts x0 and is judged by the velocity that follows from it,
    (x_t - x0) / max(t, `floor`), because the image lies on a low-dimensional manifold and the velocity does not
    (Li and He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The floor keeps errors at almost clean
    images from dominating the loss.
    """

    def __init__(self, prediction: Prediction = "flow_matching", *, cost: Cost | None = None, floor: float = 0.05) -> None:
        if prediction not in ("flow_matching", "sample"):
            raise UserError(
                f"rectified flow cannot be trained with the prediction '{prediction}'", fix="use flow_matching or sample"
            )
        self.prediction: Prediction = prediction
        self.cost = cost or Cost()
        self.floor = floor

    def times(self, u: Tensor) -> Tensor:
        return u.float()

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - t, t

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return torch.lerp(latents.float(), noise.float(), _per_sample(t, latents)).to(latents.dtype)

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return noise.float() - latents.float() if self.prediction == "flow_matching" else latents

    def errors(self, prediction: Tensor, target: Tensor, t: Tensor) -> Tensor:
        thresholds = self.cost.thresholds(self, t)
        if self.prediction == "flow_matching":
            return self.cost(prediction, target, thresholds)
        # The noisy latents cancel in the difference of both velocities.
        time = _per_sample(t, target).clamp(min=self.floor)
        return self.cost(prediction.float() / time, target.float() / time, thresholds)

    def timesteps(self, t: Tensor) -> Tensor:
        return t * STEPS

    def snr(self, t: Tensor) -> Tensor:
        return ((1 - t) / t).square()

    def to_x0_and_noise(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        time, predicted, noisy = _per_sample(t, noisy), prediction.float(), noisy.float()
        if self.prediction == "flow_matching":
            return noisy - time * predicted, noisy + (1 - time) * predicted
        return predicted, (noisy - (1 - time) * predicted) / time


# --- denoising diffusion --------------------------------------------------------------------------------------------


class Ddpm(Objective):
    """x_t = sqrt(a_t) x0 + sqrt(1 - a_t) e with a_t the product of 1 - beta up to t; times are integers in 0..999.

    Ho et al. 2020; `v_prediction`, sqrt(a_t) e - sqrt(1 - a_t) x0, is Salimans and Ho 2022.
    """

    def __init__(self, prediction: Prediction, *, betas: Tensor, cost: Cost | None = None) -> None:
        if prediction not in ("epsilon", "v_prediction", "sample"):
            raise UserError(
                f"DDPM cannot be trained with the prediction '{prediction}'", fix="use epsilon, v_prediction or sample"
            )
        alphas = (1 - betas.double()).cumprod(0)
        if prediction == "epsilon" and alphas[-1] == 0:
            raise UserError(
                "with zero terminal SNR the noise prediction says nothing about the image in the last step",
                fix="use v_prediction, or switch rescale_betas_zero_snr off",
            )
        self.prediction: Prediction = prediction
        self.cost = cost or Cost()
        self.steps = len(betas)
        self._alpha_sigma = torch.stack([alphas.sqrt(), (1 - alphas).sqrt()]).float()

    def times(self, u: Tensor) -> Tensor:
        # Step k stands for the fractions (k, k + 1] / steps, so that 1 is the last step; the small number keeps a fraction
        # such as 0.96 from falling into the next step by rounding.
        return ((u.float() * self.steps - 1e-3).ceil() - 1).clamp(0, self.steps - 1).long()

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if self._alpha_sigma.device != t.device:
            self._alpha_sigma = self._alpha_sigma.to(t.device)
        alpha, sigma = self._alpha_sigma[:, t]
        return alpha, sigma

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = self._alpha_sigma_for(t, latents)
        return (alpha * latents.float() + sigma * noise.float()).to(latents.dtype)

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return latents
        alpha, sigma = self._alpha_sigma_for(t, latents)
        return alpha * noise.float() - sigma * latents.float()

    def errors(self, prediction: Tensor, target: Tensor, t: Tensor) -> Tensor:
        return self.cost(prediction, target, self.cost.thresholds(self, t))

    def timesteps(self, t: Tensor) -> Tensor:
        return t.float()

    def snr(self, t: Tensor) -> Tensor:
        alpha, sigma = self.alpha_sigma(t)
        return (alpha / sigma).square()

    def to_x0_and_noise(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        (alpha, sigma), predicted, noisy = self._alpha_sigma_for(t, noisy), prediction.float(), noisy.float()
        if self.prediction == "epsilon":
            return (noisy - sigma * predicted) / alpha, predicted
        if self.prediction == "sample":
            return predicted, (noisy - alpha * predicted) / sigma
        return alpha * noisy - sigma * predicted, sigma * noisy + alpha * predicted

    def _alpha_sigma_for(self, t: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.alpha_sigma(t)
        return _per_sample(alpha, latents), _per_sample(sigma, latents)


def beta_table(schedule: BetaSchedule = "scaled_linear", *, start: float | None = None, end: float | None = None) -> Tensor:
    """(1000,) variances, float64. None is the published value.

    `linear`: Ho et al. 2020. `scaled_linear`: linear in the square root, Rombach et al. 2022 (Stable Diffusion).
    `squaredcos_cap_v2`: Nichol and Dhariwal 2021, equation 17, capped at 0.999; it has no start and end.
    """
    if schedule == "squaredcos_cap_v2":
        edges = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
        alphas = torch.cos((edges + 0.008) / 1.008 * math.pi / 2).square()
        return (1 - alphas[1:] / alphas[:-1]).clamp(max=0.999)
    if schedule not in PUBLISHED_BETAS:
        raise UserError(f"unknown beta schedule '{schedule}'", fix="use linear, scaled_linear or squaredcos_cap_v2")
    usual_start, usual_end = PUBLISHED_BETAS[schedule]
    first, last = usual_start if start is None else start, usual_end if end is None else end
    if not 0 < first <= last < 1:
        raise UserError(f"betas from {first:g} to {last:g} are not possible", fix="use 0 < beta_start <= beta_end < 1")
    if schedule == "linear":
        return torch.linspace(first, last, STEPS, dtype=torch.float64)
    return torch.linspace(first**0.5, last**0.5, STEPS, dtype=torch.float64).square()


def zero_terminal_snr(betas: Tensor) -> Tensor:
    """The schedule stretched so that the last step is pure noise and the first stays as it is.

    Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed", algorithm 1.
    """
    roots = (1 - betas.double()).cumprod(0).sqrt()
    roots = (roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])
    products = roots.square()
    return 1 - torch.cat([products[:1], products[1:] / products[:-1]])


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), to multiply (B, ...) with, in fp32."""
    return values.float().view(-1, *[1] * (like.dim() - 1))


class RandomColumn(IntEnum):
    """The columns of `SampleNoise.column`: which number of a visit decides what.

    Never renumber them: a run that resumes repeats its choices. A plugin that chooses something else begins at 100.
    """

    TIMESTEP = 0
    CAPTION_DROPOUT = 1
    MASK = 2
    """Whether the visit uses its mask."""
    REFERENCE = 3
    """Which reference image it uses."""
    SECOND_CAPTION = 4
    """Which caption a further forward pass gets."""


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

    def column(self, numbers: Sequence[int], column: int) -> Tensor:
        """(B,) numbers strictly between 0 and 1, fp32: those of a `RandomColumn`."""
        # 23 bits and a half: every value is exact in fp32 and none is 0 or 1, where quantile functions have no value.
        return torch.tensor([uniform_single(derive_seed(self.seed, number, 1, column)) for number in numbers])
