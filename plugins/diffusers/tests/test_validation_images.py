"""Validation images are those of the pipeline with the same settings: negative prompt, size, guidance rescale."""

from inspect import signature

import pytest
import torch
from compared import compares
from kinds import EVERY, MODULAR, PROMPTS, TOLD, call, opened

from smalti.models.family import SampleRequest
from smalti.models.weights import materialise, without_weights
from smalti_diffusers.sources.components import class_of
from smalti_testing.family_subject import native_objective
from support.whole import some

pytestmark = pytest.mark.usefixtures("torchvision")
NEGATIVE = ("ugly, blurred", "")
SIZE = (64, 128)
GUIDANCE = 50.0  # so that what is guided away from shows in images of tiny models
SCALES = {
    **{kind: {"true_cfg_scale": GUIDANCE} for kind in ("qwen image", "qwen image 2.1", "qwen image 2.1 sigmas")},
    **{kind: {"guidance_scale": GUIDANCE - 1} for kind in ("z image", "cosmos")},
}
ELSEWHERE = ("hidream dev", "hidream small")
"""Whose pipeline adds noise that depends on no seed, and whose sizes are for other tests."""
OWN = ("flux", "flux schnell", "flux2 klein distilled", "flux2 dev")
GUIDED = [kind for kind in EVERY if kind not in (*OWN, *MODULAR, *ELSEWHERE)]


def model_of(family):
    with without_weights():
        model = family.build_model()
    return materialise(model, family.weights(0), "cpu").eval()


def sampled(family, model=None, **changes):
    values = {"prompts": PROMPTS, "seeds": (1, 2), "width": SIZE[0], "height": SIZE[1], "steps": 2, "guidance": GUIDANCE}
    request = SampleRequest(objective=native_objective(family), **values | changes)
    with torch.no_grad():
        return family.sample(model or model_of(family), request)


def of_pipeline(family, kind, change=lambda pipeline: None, **changes):
    """Images of the pipeline as it is published, or as `change` leaves it."""
    pipeline = opened(family.components.folder, SIZE)
    change(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    arguments = {
        "prompt": list(PROMPTS),
        "width": SIZE[0],
        "height": SIZE[1],
        "num_inference_steps": 2,
        "guidance_scale": GUIDANCE,
        "generator": [torch.Generator().manual_seed(seed) for seed in (1, 2)],
    }
    return call(pipeline, **arguments | TOLD.get(kind, {}) | SCALES.get(kind, {}) | changes, output_type="pt") * 2 - 1


@compares("validation images", GUIDED)
@pytest.mark.parametrize("kind", some(GUIDED, "flux2 klein", "qwen image", "qwen image 2.1 sigmas", "sd3", "sdxl", "z image"))
def test_a_negative_prompt_is_what_the_pipeline_makes_of_it(family_of, kind):
    family = family_of(kind)
    given = [text or " " for text in NEGATIVE] if kind == "qwen image" else list(NEGATIVE)
    argument = {"negative_prompt": given}
    if kind == "flux2 klein":  # whose pipeline takes it encoded only
        argument = {"negative_prompt_embeds": family.encoder.encode_prompt(given, device="cpu")[0]}
    if kind == "bria":  # whose pipeline asks only the first of a list whether it is empty
        each = [family.encoder.encode_prompt([text], negative_prompt=[text])[1] for text in given]
        argument = {"negative_prompt_embeds": torch.cat(each)}
    model = model_of(family)
    mine, plain = sampled(family, model, negative_prompts=NEGATIVE), sampled(family, model)
    theirs = of_pipeline(family, kind, **argument)
    near = 2 / 255 + 1e-5 if kind == "cosmos" else 1e-5  # whose pipeline cuts images to 8 bits for its guardrail
    torch.testing.assert_close(mine, theirs, atol=near, rtol=0)
    torch.testing.assert_close(plain, of_pipeline(family, kind), atol=near, rtol=0)
    assert not torch.allclose(mine[0], plain[0], atol=1e-4)
    assert torch.allclose(mine[1], plain[1], atol=1e-4) is (kind != "sdxl")  # whose pipeline has zeros only for none
    mixed = sampled(family, model, negative_prompts=(NEGATIVE[0], None))
    torch.testing.assert_close(mixed, torch.stack([mine[0], plain[1]]), atol=1e-5, rtol=0)


def test_flux_has_a_negative_prompt_with_true_guidance(family_of):
    family = family_of("flux", f"--flux_true_cfg_scale={GUIDANCE}")
    mine = sampled(family, negative_prompts=NEGATIVE)
    theirs = of_pipeline(family, "flux", negative_prompt=list(NEGATIVE), true_cfg_scale=GUIDANCE)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    assert not family.no_negative_prompt


def test_guidance_is_rescaled_as_the_pipeline_does(family_of):
    family = family_of("sdxl")
    model = model_of(family)
    mine = sampled(family, model, guidance_rescale=0.7)
    torch.testing.assert_close(mine, of_pipeline(family, "sdxl", guidance_rescale=0.7), atol=1e-5, rtol=0)
    assert not torch.allclose(mine, sampled(family, model), atol=1e-3)


@pytest.mark.parametrize("kind", ["flux", "sdxl"])
def test_an_adapter_can_be_weaker_stronger_or_left_out(family_of, kind):
    family, base = family_of(kind, "--model_type=lora", "--lora_rank=4", "--lora_base_dtype=fp32"), family_of(kind)
    model = model_of(family)
    trained = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    random = torch.Generator().manual_seed(3)
    for parameter in trained:
        parameter.data = torch.randn(parameter.shape, generator=random)
    before = sampled(family, model)
    with family.adapter_strength(model, 0.0):
        assert torch.equal(sampled(family, model), sampled(base))
    with family.adapter_strength(model, 0.5):
        half = sampled(family, model)
    assert torch.equal(sampled(family, model), before)
    assert all(parameter.requires_grad for parameter in trained)
    for parameter in trained:
        parameter.data /= 2
    torch.testing.assert_close(half, sampled(family, model))


@pytest.mark.parametrize(
    "kind", some([kind for kind in EVERY if kind not in MODULAR], "flux", "flux2 dev", "qwen image", "sdxl")
)
def test_a_family_says_whether_its_pipeline_takes_a_negative_prompt_and_rescales_guidance(family_of, kind):
    family = family_of(kind)
    known = signature(class_of("diffusers", family.pipeline).__call__).parameters
    assert bool(family.no_guidance_rescale) == ("guidance_rescale" not in known)
    model = model_of(family)
    moved = not torch.equal(sampled(family, model, negative_prompts=NEGATIVE)[0], sampled(family, model)[0])
    assert moved == (not family.no_negative_prompt)
