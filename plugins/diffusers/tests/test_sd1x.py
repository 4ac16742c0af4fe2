"""Stable Diffusion 1 and 2: the U-Net is called as the pipeline calls it."""

import json
import shutil

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from kinds import PROMPTS

from smalti import UserError
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
