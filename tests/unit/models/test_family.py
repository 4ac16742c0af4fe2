"""What a model family inherits: sampling, counted operations, device."""

import pytest
import torch

from smalti.diffusion.objective import build_objective
from smalti.diffusion.timesteps import ResolutionShift
from smalti.errors import UserError
from smalti.models.family import SampleRequest
from smalti.models.weights import materialise
from smalti_testing import TinyFamily


class Halved(TinyFamily):
    """Latents of half the size."""

    alignment = 4

    def encode_images(self, pixels):
        return pixels[:, :, ::2, ::2]

    def decode_latents(self, latents):
        return latents.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def latent_shape(self, width, height):
        return 3, height // 2, width // 2


class Sized(TinyFamily):
    """Conditioned on the width of the original, which is its only word."""

    def encode_captions(self, captions):
        return {"texts": torch.zeros(len(captions))}

    def encode_size_conditioning(self, sizes, width, height):
        return {"words": torch.tensor([size.width % 31 for size in sizes])}


def request(prediction="flow_matching", **changes) -> SampleRequest:
    given = {"prompts": ["a fox", ""], "seeds": [1, 2], "width": 12, "height": 8, "steps": 2, "guidance": 2.0, **changes}
    return SampleRequest(objective=build_objective(prediction), **given)


def sampled(family: TinyFamily, request: SampleRequest) -> torch.Tensor:
    with torch.no_grad():
        return family.sample(materialise(family.build_model(), family.weights(0), "cpu"), request)


@pytest.mark.parametrize("kind", [TinyFamily, Halved, Sized])
def test_every_family_samples_without_a_method_of_its_own(kind):
    images = sampled(kind(), request())
    assert images.shape == (2, 3, 8, 12)
    assert torch.isfinite(images).all()


def test_conditioning_of_the_request_is_sampled_from_without_encoding():
    family = TinyFamily()
    encoded = [family.encode_captions(prompts) for prompts in (["a fox", ""], ["", ""])]
    before = sampled(family, request())
    family.encode_captions = None
    assert torch.equal(sampled(family, request(conditioning=encoded[0], unconditional=encoded[1])), before)


def test_a_size_that_the_model_cannot_have_is_refused():
    with pytest.raises(UserError, match="tiny cannot sample images of 12x7 pixels"):
        sampled(TinyFamily(), request(height=7))


def test_the_shift_of_a_flow_family_is_that_of_its_sampler():
    family = TinyFamily()
    family.flow_shift = ResolutionShift(base_tokens=0, max_tokens=24, base_mu=0.0, max_mu=2.0, exponential=False)
    assert family.build_sampler(request()).shift == 2.0  # 6 x 4 tokens
    assert family.build_sampler(request("epsilon")).shift == 1.0


def test_operations_are_counted_without_memory_for_the_model():
    family = TinyFamily(width=4000, depth=1)  # 0.6 GB of weights
    per_pixel = 2 * 3 * 4000 + 9 * 4000**2
    assert family.flops_per_sample(4, 2) == pytest.approx(2 * (8 * per_pixel + 4000**2 + 2 * 4000), rel=0.01)


def test_operations_of_a_model_that_needs_values_are_not_counted():
    class Peeking(TinyFamily):
        def forward(self, model, noisy, timesteps, conditioning):
            return super().forward(model, noisy * float(timesteps[0]), timesteps, conditioning)

    with pytest.raises(NotImplementedError, match="meta device"):
        Peeking().flops_per_sample(4, 2)
