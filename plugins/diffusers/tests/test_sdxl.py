"""Stable Diffusion XL: what its model is told is what the pipeline tells it, and the contract of a family."""

from dataclasses import replace

import pytest
import tiny
import torch
from compared import compares
from diffusers import StableDiffusionXLPipeline

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.diffusion.objective import build_objective
from smalti.models.blocks import find_blocks
from smalti.models.family import SampleRequest
from smalti.models.setup import use_channels_last
from smalti.models.size_conditioning import SizeConditioning
from smalti.models.weights import materialise
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_diffusers.families.sdxl import Sdxl
from smalti_diffusers.flavours import shipped_folder
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_fsdp2.blocks import describe_blocks
from smalti_testing.family_subject import encode
from smalti_testing.pytest import FamilyContract


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture(scope="module")
def schema():
    return schema_of(load_plugins(Selection(only=("diffusers",))))


@pytest.fixture
def configured(schema):
    """configured(folder, "--flag=1") -> the family as a run has it."""

    def give(folder, *flags):
        given = ("--model_family=sdxl", f"--pretrained_model_name_or_path={folder}", *flags)
        return Sdxl.create(resolve(schema, given, environment={}))

    return give


def family_of(folder, **options):
    return Sdxl(Components(folder), DiffusersOptions(**options))


class TestContract(FamilyContract):
    @pytest.fixture(autouse=True)
    def _folder(self, folder):
        self.folder = folder

    def family(self):
        return family_of(self.folder, init_from_config=True)


def test_an_image_counts_as_many_tokens_as_its_largest_attention_is_given(folder):
    family = family_of(folder, init_from_config=True)
    model, lengths = family.build_model(), []
    for module in model.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.register_forward_pre_hook(lambda module, arguments: lengths.append(arguments[0].shape[1]))
    frame = SizeConditioning(width=64, height=64, left=0, top=0)
    width, height = 2 * family.alignment, family.alignment
    with torch.no_grad():
        conditioning = encode(family, ["a fox"], [frame], width, height)
        noisy = torch.randn(1, family.latent_channels, height // family.vae_scale, width // family.vae_scale)
        family.forward(model, noisy, torch.tensor([500.0]), conditioning)
    assert family.image_tokens(width, height) == max(lengths)


# --- what the model is told -----------------------------------------------------------------------------------------


def told_by_the_pipeline(folder, **call):
    """What the pipeline calls its U-Net with in the first step: tensors by name."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    calls = []

    def note(module, arguments, keywords):
        calls.append(dict(zip(("sample", "timestep"), arguments, strict=True)) | keywords)

    pipeline.unet.register_forward_pre_hook(note, with_kwargs=True)
    pipeline(num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0), **call)
    return flat(calls[0])


def flat(inputs):
    """The tensors among arguments, those in dictionaries too."""
    found = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            found |= flat(value)
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def told_by_smalti(family, captions, size_conditioning, like, width, height):
    """What smalti calls it with, for the same noisy latents and time."""
    conditioning = encode(family, captions, size_conditioning, width, height)
    timesteps = torch.full((len(captions),), float(like["timestep"]))
    return flat(family.inputs(like["sample"], timesteps, conditioning))


def different(one, other):
    """The tensors in which two calls differ by more than the order of a sum, as in batches of other sizes."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.allclose(one[name].to(other[name].dtype), other[name], rtol=0, atol=1e-6)]


@compares("inputs of the model", ["sdxl"])
def test_the_model_is_told_what_the_pipeline_tells_it(folder):
    frame = SizeConditioning(width=640, height=333, left=7, top=5)
    theirs = told_by_the_pipeline(
        folder,
        prompt=["a red fox", "two boats"],
        width=96,
        height=64,
        original_size=(frame.height, frame.width),
        crops_coords_top_left=(frame.top, frame.left),
        target_size=(64, 96),
        guidance_scale=1.0,
    )
    ours = told_by_smalti(family_of(folder), ["a red fox", "two boats"], [frame, frame], theirs, 96, 64)
    assert different(theirs, ours) == []


@pytest.mark.parametrize("force_zeros", [True, False])
def test_a_dropped_caption_is_what_the_pipeline_guides_away_from(tmp_path, force_zeros):
    folder = tiny.sdxl(tmp_path, force_zeros=force_zeros)
    theirs = told_by_the_pipeline(folder, prompt=["a red fox"], width=64, height=64, guidance_scale=5.0)
    frame = SizeConditioning(width=64, height=64, left=0, top=0)
    ours = told_by_smalti(family_of(folder), ["", "a red fox"], [frame, frame], theirs, 64, 64)
    assert different(theirs, ours) == []


@pytest.mark.parametrize("force_zeros", [True, False])
def test_what_a_dropped_caption_is_can_be_chosen_and_is_cached_apart(tmp_path, configured, force_zeros):
    folder = tiny.sdxl(tmp_path, force_zeros=force_zeros)
    families = {choice: configured(folder, f"--sdxl_empty_prompt={choice}") for choice in ("auto", "zeros", "encoded")}
    found = {choice: family.encode_captions([""]) for choice, family in families.items()}
    identity = {choice: family.encoder_identity("texts") for choice, family in families.items()}
    same, other = ("zeros", "encoded") if force_zeros else ("encoded", "zeros")
    assert not any(tensor.any() for tensor in found["zeros"].values())
    assert all(torch.equal(tensor, found[same][name]) for name, tensor in found["auto"].items())
    assert not any(torch.equal(tensor, found[other][name]) for name, tensor in found["auto"].items())
    assert [identity["auto"] == identity[choice] for choice in (same, other)] == [True, False]


def test_size_conditioning_is_given_sample_by_sample(folder):
    sizes = [
        SizeConditioning(width=640, height=480, left=3, top=0),
        SizeConditioning(width=100, height=200, left=0, top=9),
    ]
    told = family_of(folder).encode_size_conditioning(sizes, 96, 64)["time_ids"]
    assert told.tolist() == [[480, 640, 0, 3, 64, 96], [200, 100, 9, 0, 64, 96]]


def test_another_size_conditioning_makes_another_prediction(folder):
    family = family_of(folder)
    model = materialise(family.build_model(), family.weights(0), "cpu")
    frame = SizeConditioning(width=640, height=480, left=0, top=0)
    noisy = torch.randn(1, 4, 16, 16)
    one, other = (
        family.forward(model, noisy, torch.tensor([500.0]), encode(family, ["a"], [each], 64, 64))
        for each in (frame, replace(frame, left=300))
    )
    assert not torch.allclose(one, other)


def test_convolutions_run_on_channels_last_with_the_same_result(folder):
    seen, found = [], []
    for chosen in (False, True):
        family = family_of(folder)
        model = materialise(family.build_model(), family.weights(0), "cpu")
        if chosen:
            use_channels_last(model)
        for module in (each for each in model.modules() if isinstance(each, torch.nn.Conv2d) and chosen):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        conditioning = encode(family, ["a fox"], [SizeConditioning(width=64, height=64, left=0, top=0)], 64, 64)
        noisy = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        found.append(family.forward(model, noisy, torch.tensor([500.0]), conditioning))
    assert torch.allclose(*found, atol=1e-5)
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in seen)
    assert len(seen) > 10


# --- latents and pictures -------------------------------------------------------------------------------------------


def test_latents_are_the_mean_times_the_scaling_factor(folder):
    family, pixels = family_of(folder), torch.rand(1, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        expected = StableDiffusionXLPipeline.from_pretrained(folder).vae.encode(pixels).latent_dist.mean * 0.13025
        assert torch.equal(family.encode_images(pixels), expected)


def request(**changes):
    values = {"prompts": ["a fox"], "seeds": [3], "width": 64, "height": 64, "steps": 3, "guidance": 4.0}
    return SampleRequest(objective=build_objective("epsilon"), **(values | changes))


def test_pictures_are_those_of_the_pipeline(folder):
    family = family_of(folder)
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        ["a fox"],
        width=64,
        height=64,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=[torch.Generator().manual_seed(3)],
        output_type="pt",
    ).images
    with torch.no_grad():
        ours = family.sample(materialise(family.build_model(), family.weights(0), "cpu").eval(), request())
    assert torch.allclose(ours, theirs * 2 - 1, atol=1e-5)


def test_the_autoencoder_stays_in_fp32_under_autocast(folder):
    family = family_of(folder)
    latents = torch.randn(1, 4, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = family.vae.decode(latents.bfloat16(), return_dict=False)[0]
    with torch.no_grad():
        assert torch.equal(inside, family.vae.decode(latents.bfloat16().float(), return_dict=False)[0])


# --- the noise schedule ---------------------------------------------------------------------------------------------


def test_the_scheduler_says_what_the_model_predicts(tmp_path, configured):
    assert configured(tiny.sdxl(tmp_path, prediction_type="v_prediction")).prediction == "v_prediction"


def test_pictures_are_drawn_with_the_prediction_that_is_trained(folder, configured):
    family = configured(folder, "--prediction_type=v_prediction", "--rescale_betas_zero_snr")
    scheduler = family.frozen.scheduler.config
    assert (scheduler.prediction_type, scheduler.rescale_betas_zero_snr, scheduler.timestep_spacing) == (
        "v_prediction",
        True,
        "trailing",
    )


def test_training_corrupts_as_the_scheduler_undoes(folder, configured):
    alpha, _ = build_objective("epsilon", native="epsilon").alpha_sigma(torch.arange(1000))
    theirs = configured(folder).frozen.scheduler.alphas_cumprod.sqrt()
    assert torch.allclose(alpha, theirs, atol=1e-5)


REFUSED = {
    "another-schedule": ({"beta_schedule": "linear"}, ("--beta_schedule=scaled_linear",), "noise schedule linear"),
    "betas-of-another-schedule": ({"beta_schedule": "linear"}, (), "beta_start=0.00085"),
    "other-betas": ({"beta_end": 0.02}, (), "beta_end=0.02"),
    "a-table": ({"trained_betas": [0.001] * 1000}, (), "cannot be trained"),
    "zero-snr": ({"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}, (), "--rescale_betas_zero_snr"),
    "sample": ({}, ("--prediction_type=sample",), "'sample'"),
    "flow": ({}, ("--prediction_type=flow_matching",), "'flow_matching'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_pipeline_would_not_undo_is_refused(tmp_path, configured, case):
    scheduler, flags, told = REFUSED[case]
    with pytest.raises(UserError) as caught:
        configured(tiny.sdxl(tmp_path, **scheduler), *flags)
    assert told in f"{caught.value} {caught.value.fix}"


def test_a_refiner_is_refused(tmp_path, configured):
    index = tiny.sdxl(tmp_path) / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"))
    with pytest.raises(UserError, match="is a StableDiffusionXLImg2ImgPipeline, not a StableDiffusionXLPipeline"):
        configured(tmp_path)


# --- the published model --------------------------------------------------------------------------------------------


@pytest.fixture
def published():
    """The family over the published configurations, without any weights."""
    return family_of(shipped_folder("stabilityai/stable-diffusion-xl-base-1.0"))


def test_no_block_holds_much_of_the_published_model(published):
    with torch.device("meta"):
        structure = describe_blocks(published.build_model(), published.block_classes())
    assert (structure.blocks, structure.largest_block, structure.outside) == (87, 49_164_800, 54_163_204)


def test_the_last_block_is_the_last_that_computes(published):
    with torch.device("meta"):
        blocks = find_blocks(published.build_model(), published.block_classes())
    assert [block.path for block in blocks if not block.reshard] == ["up_blocks.2.resnets.2"]
