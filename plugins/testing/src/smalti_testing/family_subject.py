"""One model family and what the checks of its contract need of it again and again. Runs on the CPU, in fp32.

Shapes: B batch, C latent channels, H, W pixels, h, w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from smalti.diffusion import Conditioning, Objective, build_objective
from smalti.models import ModelFamily, SampleRequest, SizeConditioning, materialise

CAPTIONS: tuple[str, str, str] = ("a red fox in the snow", "two boats", "")
SIZE = SizeConditioning(width=640, height=480, left=3, top=0)


def native_objective(family: ModelFamily) -> Objective:
    """What a family trains unless the options say otherwise."""
    return build_objective(family.prediction, native=family.prediction, beta_schedule=family.beta_schedule)


def encode(
    family: ModelFamily, captions: Sequence[str], sizes: Sequence[SizeConditioning], width: int, height: int
) -> Conditioning:
    """All conditioning of samples, whose images are `width` x `height` pixels."""
    return family.encode_captions(captions) | family.encode_size_conditioning(sizes, width, height)


@dataclass(frozen=True)
class FamilySubject:
    """One family, and what the checks need of it again and again."""

    family: ModelFamily
    captions: tuple[str, str, str] = CAPTIONS
    """Two that the family tells apart from each other and from the empty prompt, which is the third."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the images: small, and not square."""
        return 3 * self.family.alignment, 2 * self.family.alignment

    @cached_property
    def pixels(self) -> Tensor:
        """(B, 3, H, W), as many as captions."""
        width, height = self.size
        pixels = torch.rand(len(self.captions), 3, height, width, generator=torch.Generator().manual_seed(0))
        return pixels * 2 - 1

    @cached_property
    def latents(self) -> Tensor:
        with torch.no_grad():
            return self.family.encode_images(self.pixels).detach()

    def bare(self) -> nn.Module:
        """The model as a run builds it: parameters on the meta device."""
        with init_empty_weights(include_buffers=False):
            return self.family.build_model()

    def model(self, *, recompute: bool = False) -> nn.Module:
        """A model with weights and a little noise on them: first weights may be zeros on purpose and would hide everything."""
        model = self.bare()
        if recompute:
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        model = materialise(model, self.family.weights(0), "cpu").eval()
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.05)
        return model

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Sequence[float], captions: Sequence[str]) -> Tensor:
        return self.family.forward(model, noisy, torch.tensor(timesteps), self.encode(captions))

    def encode(self, captions: Sequence[str]) -> Conditioning:
        width, height = self.size
        with torch.no_grad():
            return encode(self.family, captions, [SIZE] * len(captions), width, height)

    def sample(
        self, model: nn.Module, prompts: Sequence[str], seeds: Sequence[int], conditioning: Conditioning | None = None
    ) -> Tensor:
        """Images; `conditioning` is that of the prompts, if the family is to sample from it."""
        width, height = self.size
        request = SampleRequest(
            prompts=prompts,
            seeds=seeds,
            width=width,
            height=height,
            steps=2,
            guidance=2.0,
            objective=native_objective(self.family),
        )
        if conditioning is not None:
            empty = self.family.encode_captions([""] * len(prompts))
            request = replace(request, conditioning=conditioning, unconditional=empty)
        with torch.no_grad():
            return self.family.sample(model, request)
