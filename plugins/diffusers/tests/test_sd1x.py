"""Stable Diffusion 1 and 2: the U-Net is called as the pipeline calls it, and trained as the formulas of diffusers say."""

import json
import shutil

import pytest
import torch
from compared import compares
from diffusers import DDIMScheduler, DDPMScheduler, StableDiffusionPipeline
from kinds import PROMPTS
from torch.nn.functional import mse_loss

from smalti import UserError
from smalti.diffusion.objective import build_objective
from smalti.models.weights import materialise
from smalti_diffusers.families.sd1x import StableDiffusion1
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_testing.pytest import FamilyContract

BOTH = ("sd1x", "sd2x")


class TestContract(FamilyContract):
    @pytest.fixture(autouse=True)
    def _families(self, family_of):
        self.family_of = family_of

    def family(self):
        return self.family_of("sd1x", "--init_from_config")


def model_of(family):
    return materialise(family.build_model(), family.weights(0), "cpu")


@compares("inputs of the model", BOTH)
@pytest.mark.parametrize("kind", BOTH)
def test_the_unet_is_called_with_what_the_pipeline_calls_it_with(family_of, kind):
    family = family_of(kind)
    pipeline = StableDiffusionPipeline.from_pretrained(family.components.folder)
    pipeline.set_progress_bar_config(disable=True)
    calls = []
    pipeline.unet.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    pipeline(list(PROMPTS), width=96, height=64, num_inference_steps=2, output_type="latent")
    (sample, timestep), named = calls[0]
    ours = family.inputs(sample, timestep.expand(4), family.encode_captions(["", "", *PROMPTS]))
    torch.testing.assert_close(ours["encoder_hidden_states"], named["encoder_hidden_states"])
    assert torch.equal(ours["sample"], sample)
    assert {name for name, value in named.items() if value is not None} == {"encoder_hidden_states", "return_dict"}
    images = torch.rand(2, 3, 64, 96) * 2 - 1
    with torch.no_grad():
        raw = pipeline.vae.encode(images).latent_dist.mode()
        torch.testing.assert_close(family.encode_images(images), raw * pipeline.vae.config.scaling_factor)


@pytest.mark.parametrize("kind", BOTH)
def test_loss_and_gradients_are_those_of_diffusers(family_of, kind):
    """As its script for text-to-image computes them: the noise of DDPMScheduler, and epsilon or v as the target."""
    family = family_of(kind)
    scheduler = DDPMScheduler.from_config(family.frozen.scheduler.config)
    assert scheduler.config.prediction_type == family.prediction == {"sd1x": "epsilon", "sd2x": "v_prediction"}[kind]
    random = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 2, 4, 16, 24, generator=random)
    timesteps, conditioning = torch.tensor([17, 801]), family.encode_captions(PROMPTS)
    theirs, ours = model_of(family), model_of(family)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    target = noise if kind == "sd1x" else scheduler.get_velocity(latents, noise, timesteps)
    loss = mse_loss(theirs(noisy, timesteps, conditioning["tokens"], return_dict=False)[0], target)
    loss.backward()

    objective = build_objective(family.prediction, beta_schedule=family.beta_schedule)
    found = objective.add_noise(latents, noise, timesteps)
    torch.testing.assert_close(found, noisy)
    prediction = family.forward(ours, found, objective.timesteps(timesteps), conditioning)
    own = mse_loss(prediction, objective.target(latents, noise, timesteps))
    own.backward()
    torch.testing.assert_close(own, loss)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name, atol=1e-5, rtol=1e-4)


def test_latents_are_scaled_by_the_default_of_the_class_where_the_configuration_has_no_factor(family_of, tmp_path):
    """As those published before diffusers had the factor."""
    folder = shutil.copytree(family_of("sd1x").components.folder, tmp_path / "older")
    config = json.loads((folder / "vae" / "config.json").read_text())
    assert config.pop("scaling_factor") == 0.18215
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    images = torch.rand(1, 3, 64, 64) * 2 - 1
    found = StableDiffusion1(Components(folder), DiffusersOptions()).encode_images(images)
    assert torch.equal(found, family_of("sd1x").encode_images(images))


def test_a_safety_checker_is_part_of_an_export_and_is_not_loaded(family_of, tmp_path):
    folder = shutil.copytree(family_of("sd1x").components.folder, tmp_path / "published")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "requires_safety_checker": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "config.json").write_text("{}")
    (folder / "safety_checker" / "model.safetensors").write_bytes(b"not read")
    family = StableDiffusion1(Components(folder), DiffusersOptions())
    assert family.frozen.safety_checker is None
    assert len(list(family.components.files("safety_checker"))) == 2


def test_a_scheduler_that_cannot_start_from_pure_noise_is_refused_with_zero_terminal_snr(family_of):
    with pytest.raises(UserError, match="cannot sample from pure noise"):
        family_of("sd1x", "--rescale_betas_zero_snr")
    family = family_of("sd2x", "--rescale_betas_zero_snr")
    assert isinstance(family.frozen.scheduler, DDIMScheduler)
    assert family.frozen.scheduler.config.rescale_betas_zero_snr


def test_a_pipeline_of_another_task_is_refused(family_of, tmp_path):
    folder = shutil.copytree(family_of("sd1x").components.folder, tmp_path / "inpainting")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionInpaintPipeline"}))
    with pytest.raises(UserError, match="is a StableDiffusionInpaintPipeline"):
        StableDiffusion1(Components(folder), DiffusersOptions())
