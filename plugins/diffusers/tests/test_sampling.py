"""Validation images with another scheduler, or decoded in tiles: the same images up to what that changes, or a refusal."""

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler
from test_validation_images import model_of, of_pipeline, sampled

from smalti import UserError
from smalti_diffusers.sampling import scheduler_in_place
from support.whole import some

SIGMAS = ["anima", "ideogram", "krea2", "longcat image", "lumina2", "qwen image", "qwen image 2.1", "z image"]
"""Kinds whose pipelines compute the noise levels themselves."""
SOLVERS = [
    *(
        (kind, name)
        for kind in ("flux", "flux2 klein", "sd3", "sana", "auraflow", "ovis image")
        for name in ("euler", "unipc", "dpm++")
    ),
    ("bria", "euler"),
    *((kind, name) for kind in (*SIGMAS, "hidream") for name in ("euler", "unipc")),
    *((kind, name) for kind in ("sdxl", "pixart sigma") for name in ("ddim", "euler", "heun", "unipc", "dpm++")),
]
KEPT = [
    *(("flux", "euler"), ("sd3", "unipc"), ("sana", "dpm++"), ("qwen image", "euler")),
    *(("sdxl", name) for name in ("ddim", "euler", "heun", "unipc", "dpm++")),
]
SHORT = "--tokenizer_max_length=32"
ONE = {"prompts": ["a red fox"], "seeds": (1,), "guidance": 2.0, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def solved(family_of):
    """An image of a kind in many steps of its own scheduler, which is made once."""
    found = {}

    def give(kind):
        if kind not in found:
            family = family_of(kind, SHORT)
            model = model_of(family)
            found[kind] = model, sampled(family, model, steps=60, **ONE), family.frozen.scheduler.timesteps
        return found[kind]

    return give


@pytest.mark.parametrize(("kind", "name"), some(SOLVERS, *KEPT))
def test_every_scheduler_solves_the_equation_of_the_model(family_of, solved, kind, name):
    model, expected, times = solved(kind)
    family = family_of(kind, SHORT, f"--validation_noise_scheduler={name}")
    found = sampled(family, model, steps=30, **ONE)
    assert (found - expected).square().mean().sqrt() < 0.08 * expected.std()
    # Its steps are where those of the pipeline's own scheduler are: the timestep shift is the same.
    assert family.frozen.scheduler.timesteps.double().mean() == pytest.approx(float(times.double().mean()), rel=0.06)


def test_a_chosen_scheduler_gives_the_images_of_the_pipeline_with_it(family_of):
    def change(pipeline):
        pipeline.scheduler = EulerAncestralDiscreteScheduler.from_config(pipeline.scheduler.config)

    family = family_of("sdxl", "--validation_noise_scheduler=EulerAncestralDiscreteScheduler")
    model = model_of(family)
    mine = sampled(family, model)
    torch.testing.assert_close(mine, of_pipeline(family, "sdxl", change), atol=1e-5, rtol=0)
    assert not torch.allclose(mine, sampled(family_of("sdxl"), model), atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "name", "flags", "message"),
    [
        ("flux", "ddim", (), "because its model is one of rectified flow"),
        ("lumina2", "dpm++", (), "because its pipeline computes the noise levels itself"),
        ("bria", "unipc", (), "shifts noise levels by size for FlowMatchEulerDiscreteScheduler alone"),
        ("sdxl", "heun", ("--rescale_betas_zero_snr",), "because the noise schedule of the run ends in pure noise"),
    ],
)
def test_a_scheduler_that_does_not_fit_the_model_is_refused_with_those_that_do(family_of, kind, name, flags, message):
    with pytest.raises(UserError, match=message) as error:
        family_of(kind, f"--validation_noise_scheduler={name}", *flags)
    (first, *others) = (
        error.value.fix.removeprefix("--validation_noise_scheduler=").replace("; also possible:", ",").split(", ")
    )
    for each in (first, *others):
        family_of(kind, f"--validation_noise_scheduler={each}", *flags)


@pytest.mark.parametrize("kind", SIGMAS)
def test_what_is_refused_would_fail_in_the_pipeline(family_of, kind):
    family = family_of(kind)
    family.frozen.scheduler = scheduler_in_place("dpm++", dict(family.frozen.scheduler.config), flow=True)
    with pytest.raises((TypeError, ValueError), match=r"custom|sigmas"):
        sampled(family, model_of(family), **ONE)


def in_small_tiles(vae):
    vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 8


def test_images_are_decoded_in_tiles_and_latents_are_not(family_of):
    def change(pipeline):
        pipeline.vae.enable_tiling()
        in_small_tiles(pipeline.vae)

    family, plain = family_of("sdxl", "--vae_enable_tiling"), family_of("sdxl")
    model = model_of(family)
    in_small_tiles(family.vae)
    in_small_tiles(plain.vae)
    mine = sampled(family, model)
    torch.testing.assert_close(mine, of_pipeline(family, "sdxl", change), atol=1e-5, rtol=0)
    assert not torch.allclose(mine, sampled(plain, model), atol=1e-4)
    pixels = torch.rand(1, 3, 128, 128) * 2 - 1
    with torch.no_grad():
        assert torch.equal(family.encode_images(pixels), plain.encode_images(pixels))


@pytest.mark.parametrize("kind", ["sdxl", "sana", "qwen image", "flux2 klein"])
def test_images_are_decoded_one_by_one(family_of, kind):
    family, counts = family_of(kind, "--vae_enable_slicing"), []
    model = model_of(family)
    decode = family.vae._decode
    family.vae._decode = lambda latents, *more, **named: (counts.append(len(latents)), decode(latents, *more, **named))[1]
    torch.testing.assert_close(sampled(family, model), sampled(family_of(kind), model), atol=1e-4, rtol=0)
    assert counts == [1, 1]
    assert not family.vae.use_slicing
