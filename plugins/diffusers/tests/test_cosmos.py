"""Cosmos-Predict2, whose pipeline counts noise as EDM does: what it calls its model with, and what it makes of the answer."""

from inspect import signature

import pytest
import torch
from compared import compares
from kinds import EMPTY, GUIDANCE, PROMPTS, SIZE, opened

from smalti import UserError
from smalti_testing.pytest import FamilyContract

pytestmark = pytest.mark.usefixtures("torchvision")
LATENTS = (2, 4, SIZE[1] // 4, SIZE[0] // 4)
STRONGEST = 80.0
"""The noise of the first step, over that of the image."""


@pytest.fixture
def drawn(family_of):
    """The family, the noise, what the pipeline calls the model with in two steps, and with what it calls its scheduler."""
    family = family_of("cosmos")
    pipeline, calls, answers = opened(family.components.folder), [], []
    pipeline.set_progress_bar_config(disable=True)
    bound, step = signature(type(pipeline.transformer).forward).bind, pipeline.scheduler.step
    pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(bound(module, *args, **kwargs).arguments), with_kwargs=True
    )
    pipeline.scheduler.step = lambda answer, *others, **named: (answers.append(answer), step(answer, *others, **named))[1]
    noise = torch.randn(LATENTS, generator=torch.Generator().manual_seed(1))
    sizes = {"width": SIZE[0], "height": SIZE[1], "num_inference_steps": 2, "guidance_scale": GUIDANCE}
    pipeline(list(PROMPTS), EMPTY, latents=noise.unsqueeze(2), output_type="latent", **sizes)
    return family, pipeline, noise, calls, answers


@compares("inputs of the model", ["cosmos"])
def test_the_model_is_called_with_what_the_pipeline_calls_it_with(drawn):
    family, noise, calls = (drawn[part] for part in (0, 2, 3))
    assert len(calls) == 4  # two steps, each with the prompts and then without
    time = STRONGEST / (1 + STRONGEST)
    for call, captions in zip(calls[:2], (PROMPTS, EMPTY), strict=True):
        theirs = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        assert not theirs.pop("padding_mask").any()
        ours = family.inputs(time * noise, torch.full((2,), 1000 * time), family.encode_captions(captions))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-5, msg=name)


def test_the_prediction_is_the_velocity_from_the_image_to_the_noise(drawn):
    """Where it is exact, the image that the pipeline finds in its latents is that of rectified flow."""
    family, pipeline, noise, _, answers = drawn
    time, model = STRONGEST / (1 + STRONGEST), family.build_base()
    model.load_state_dict(pipeline.transformer.state_dict())
    with torch.no_grad():
        said = [
            family.forward(model, time * noise, torch.full((2,), 1000 * time), family.encode_captions(captions))
            for captions in (PROMPTS, EMPTY)
        ]
    images = [time * noise - time * velocity for velocity in said]
    guided = images[0] + GUIDANCE * (images[0] - images[1])
    found = STRONGEST * noise - STRONGEST * answers[0].squeeze(2)
    torch.testing.assert_close(found, guided, atol=1e-4, rtol=0)


def test_only_the_pipelines_own_way_to_sample_is_known(family_of):
    assert family_of("cosmos", "--validation_noise_scheduler=euler").frozen.scheduler.config.use_karras_sigmas
    with pytest.raises(UserError, match="counts noise as EDM does"):
        family_of("cosmos", "--validation_noise_scheduler=unipc")


class TestCosmos(FamilyContract):
    @pytest.fixture(autouse=True)
    def _families(self, family_of):
        self.family_of = family_of

    def family(self):
        return self.family_of("cosmos", "--init_from_config", "--tokenizer_max_length=24")
