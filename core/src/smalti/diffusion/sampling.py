"""Sampling images with a trained model, for families that bring no pipeline of their own.

One deterministic step serves both processes: split the prediction into x0 and noise, and add both again
at the next, lower noise level. For rectified flow that is the Euler method, for DDPM it is DDIM with eta 0 (Song et al. 2020).

Shapes: B images, latents (B, C, h, w), times (N,) for N steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smalti.diffusion.objective import Conditioning, Objective
from smalti.diffusion.timesteps import shift_times
from smalti.errors import UserError

Denoise = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(noisy latents (B, C, h, w), timesteps (B,) in [0, 1000], conditioning) -> the raw prediction."""


def seeded_noise(seeds: Sequence[int], shape: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """(B, *shape) unit normal, one seed per image; made on the CPU, so that a seed means the same on every device."""
    rows = [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).to(device)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How to get from noise to images.

    `guidance` is the scale of classifier-free guidance (Ho and Salimans 2022): 1 is the plain model at half the cost.
    `guidance_rescale` mixes in the guided prediction with the standard deviation of the one for the prompt (Lin et al. 2023,
    section 3.4): 0 is none of it, 1 that alone.
    `shift` spends more of the steps near noise (> 1), as larger images want.
    """

    objective: Objective
    steps: int = 25
    guidance: float = 1.0
    guidance_rescale: float = 0.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise UserError(f"{self.steps} sampling steps are not possible", fix="use 1 to 1000")
        if self.shift <= 0:
            raise UserError(f"a sampling shift of {self.shift:g} is not possible", fix="use a positive number")

    def times(self, device: str | torch.device = "cpu") -> Tensor:
        """(N,) times, from pure noise downwards; what the last one predicts is the image."""
        fractions = torch.linspace(1, 1 / self.steps, self.steps, device=device)
        return self.objective.times(shift_times(fractions, self.shift))

    def __call__(
        self, denoise: Denoise, start: Tensor, conditioning: Conditioning, empty: Conditioning | None = None
    ) -> Tensor:
        """Latents from unit normal noise `start`, in fp32.

        `empty` is the conditioning of the empty prompt, shaped like `conditioning`; it is needed for a guidance other than 1
        and then goes through the model in the same batch.
        """
        guided = self.guidance != 1.0
        if guided and empty is None:
            raise ValueError("guidance needs the conditioning of the empty prompt")
        if guided and empty is not None:
            conditioning = {key: torch.cat([value, empty[key]]) for key, value in conditioning.items()}
        noisy = x0 = start.float()
        noise = start.float()
        for step, time in enumerate(self.times(start.device)):
            t = time.expand(len(start))
            if step:
                alpha, sigma = self.objective.alpha_sigma(time)
                noisy = alpha * x0 + sigma * noise
            x0, noise = self.objective.to_x0_and_noise(self._predict(denoise, noisy, t, conditioning, guided), noisy, t)
        return x0

    def _predict(self, denoise: Denoise, noisy: Tensor, t: Tensor, conditioning: Conditioning, guided: bool) -> Tensor:
        timesteps = self.objective.timesteps(t)
        if not guided:
            return denoise(noisy, timesteps, conditioning).float()
        both = denoise(torch.cat([noisy, noisy]), torch.cat([timesteps, timesteps]), conditioning).float()
        prompted, plain = both.chunk(2)
        answer = plain + self.guidance * (prompted - plain)
        if self.guidance_rescale:
            widths = [each.flatten(1).std(dim=1).view(-1, *[1] * (each.ndim - 1)) for each in (prompted, answer)]
            answer = torch.lerp(answer, answer * (widths[0] / widths[1].clamp_min(1e-12)), self.guidance_rescale)
        return answer
