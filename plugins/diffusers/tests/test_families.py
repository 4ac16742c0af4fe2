"""Every family calls its model exactly as diffusers' own pipeline does, and keeps the contract of a family."""

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature

import pytest
import torch
from compared import compares
from diffusers import Krea2Transformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu
from kinds import EMPTY, GIVEN, GUIDANCE, MAKERS, PROMPTS, SIZE, TOLD, call, opened

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.diffusion.objective import RectifiedFlow
from smalti.diffusion.timesteps import LogitNormal, shift_times
from smalti.models.family import SampleRequest
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti.training.loss import denoising_loss
from smalti_diffusers.families.chroma import Chroma
from smalti_diffusers.families.flux2 import Flux2
from smalti_diffusers.families.lumina2 import Lumina2
from smalti_diffusers.families.sana import Sana
from smalti_diffusers.families.tokens import unpack
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import PipelineFamily
from smalti_diffusers.sources.components import Components
from smalti_testing.family_subject import FamilySubject, native_objective
from smalti_testing.pytest import FamilyContract
from support.whole import some

# Of which captions the calls of one step tell, where they are not one call that tells of empty ones first.
CALLS = {
    "flux": [PROMPTS],
    "flux schnell": [PROMPTS],
    "chroma": [PROMPTS, EMPTY],
    "flux2 klein": [PROMPTS, EMPTY],
    "flux2 klein distilled": [PROMPTS],
    "flux2 dev": [PROMPTS],
    "ideogram": [PROMPTS],
    "krea2": [PROMPTS, EMPTY],
    "krea2 turbo": [PROMPTS, EMPTY],
    "longcat image": [PROMPTS, EMPTY],
    "lumina2": [PROMPTS, EMPTY],
    "ovis image": [PROMPTS, EMPTY],
    "qwen image": [PROMPTS, EMPTY],
    "qwen image 2.1": [PROMPTS, EMPTY],
    "qwen image 2.1 sigmas": [PROMPTS, EMPTY],
    "z image": [PROMPTS + EMPTY],
}
# How a pipeline is told to draw without guidance, where that is not by a scale of 1.
UNGUIDED = {
    "flux": {},
    "flux schnell": {},
    "flux2 dev": {},
    "krea2": {"guidance_scale": 0.0},
    "krea2 turbo": {"guidance_scale": 0.0},
    "qwen image": {"true_cfg_scale": 1.0},
    "qwen image 2.1": {"true_cfg_scale": 1.0},
    "qwen image 2.1 sigmas": {"true_cfg_scale": 1.0},
    "z image": {"guidance_scale": 0.0},
}


VARIANTS = ("flux schnell", "flux2 klein distilled", "krea2 turbo", "qwen image 2.1 sigmas", "sd3.5")
"""Other settings of a family that is drawn with all the same."""


@pytest.fixture(scope="module", params=some(MAKERS, *(kind for kind in MAKERS if kind not in VARIANTS)))
def drawn(request, family_of):
    """A family, its model, and what its pipeline calls that model with while it draws two pictures in two steps."""
    family = family_of(request.param, f"--flux_guidance_value={GUIDANCE}")
    pipeline = opened(family.components.folder)
    pipeline.set_progress_bar_config(disable=True)
    calls = []
    model = pipeline.components[family.part]
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(signature(type(module).forward).bind(module, *args, **kwargs).arguments),
        with_kwargs=True,
    )
    noise = torch.stack([torch.randn(latent_shape(family), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])

    def draw(output, *, together=False, **more):
        arguments = {
            "latents": GIVEN.get(family.name, torch.clone)(noise),
            "width": SIZE[0],
            "height": SIZE[1],
            "num_inference_steps": 2,
            "guidance_scale": GUIDANCE,
        }
        arguments |= TOLD.get(request.param, {}) | more
        return call(pipeline, together=together, prompt=list(PROMPTS), output_type=output, **arguments)

    pictures = draw("pt", together=True) * 2 - 1
    hook.remove()
    if family.name == "qwen_image21":
        pictures = draw("pt") * 2 - 1
    latents = kept(draw("latent"), noise, pipeline)
    predictions, step = [], pipeline.scheduler.step
    pipeline.scheduler.step = lambda answer, *others, **named: (predictions.append(answer), step(answer, *others, **named))[1]
    draw("latent", **UNGUIDED.get(request.param, {"guidance_scale": 1.0}))
    captions = CALLS.get(request.param, [EMPTY + PROMPTS])
    timesteps, prediction = pipeline.scheduler.timesteps, unpacked(torch.cat(predictions[::2]), noise)
    return Drawn(family, model, noise, captions, calls, timesteps, prediction, latents, pictures)


@dataclass(frozen=True)
class Drawn:
    family: PipelineFamily
    model: torch.nn.Module
    noise: torch.Tensor
    captions: list
    calls: list
    timesteps: torch.Tensor
    prediction: torch.Tensor
    latents: torch.Tensor
    pictures: torch.Tensor

    def built(self):
        """The model as a run builds it, with these weights."""
        model = self.family.build_base()
        model.load_state_dict(self.model.state_dict(), assign=True)
        return model.eval()

    def theirs(self, step):
        """The tensors of the pipeline's calls in a step."""
        each = len(self.captions)
        return [tensors(call) for call in self.calls[each * step : each * (step + 1)]]

    def ours(self, step):
        """Those that smalti calls the model with for the same captions and noise."""
        return [tensors(self.inputs(step, captions)) for captions in self.captions]

    def inputs(self, step, captions):
        noisy = torch.cat([self.noise] * (len(captions) // len(PROMPTS)))
        with torch.no_grad():
            conditioning = self.family.encode_captions(captions)
            return unpadded(self.family.inputs(noisy, self.timesteps[step].float().expand(len(noisy)), conditioning))


def unpadded(inputs):
    """Without what texts are padded with to a multiple of 64 tokens, and Qwen-Image's mask where the model takes it."""
    if "text_lens" in inputs:
        assert inputs["text_bth"].shape[1] == 64
        return inputs | {"text_bth": inputs["text_bth"][:, : int(inputs["text_lens"].max())]}
    if (mask := (inputs.pop("attention_kwargs", None) or {}).get("encoder_hidden_states_mask")) is None:
        return inputs
    assert mask.shape[1] == 64
    mask = mask[:, : int(mask.sum(1).max())]
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, : mask.shape[1]]
    return inputs if mask.all() else inputs | {"encoder_hidden_states_mask": mask}


def unpacked(latents, like):
    """What a pipeline packs as tokens, as latents: a token is a square of them, or one."""
    if latents.ndim == 4:
        return latents
    one = latents.shape[-1] == like.shape[1]
    return latents.transpose(1, 2).reshape(like.shape) if one else unpack(latents, *like.shape[-2:])


def kept(drawn, like, pipeline):
    """The latents that a pipeline gives out, as smalti has them: those of Flux.2 are the autoencoder's own."""
    if drawn.shape[-2:] == like.shape[-2:] or drawn.ndim == 3:
        return unpacked(drawn, like)
    bn = pipeline.vae.bn
    return torch.nn.functional.batch_norm(
        torch.nn.functional.pixel_unshuffle(drawn, 2), bn.running_mean, bn.running_var, eps=bn.eps
    )


def latent_shape(family):
    return family.latent_channels, SIZE[1] // family.vae_scale, SIZE[0] // family.vae_scale


def tensors(arguments):
    """The tensors among the arguments of a call; those that one of them is a dictionary or a list of, too."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            found |= tensors({f"{name}.{key}": each for key, each in value.items()})
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


@compares("inputs of the model", MAKERS)
def test_the_model_is_called_with_what_the_pipeline_calls_it_with(drawn):
    for ours, theirs in zip(drawn.ours(0), drawn.theirs(0), strict=True):
        # Not to the last bit: on some processors it depends on how many prompts are encoded at once.
        torch.testing.assert_close(ours, theirs, check_dtype=False)


def test_in_the_middle_it_is_told_the_same_time(drawn):
    for ours, theirs in zip(drawn.ours(1), drawn.theirs(1), strict=True):
        (time,) = theirs.keys() & {"timestep", "timesteps", "t"}
        torch.testing.assert_close(ours[time], theirs[time], check_dtype=False)


def test_the_prediction_is_what_the_pipeline_tells_its_scheduler(drawn):
    with torch.no_grad():
        conditioning = drawn.family.encode_captions(PROMPTS)
        found = drawn.family.forward(drawn.built(), drawn.noise, drawn.timesteps[:1].float().expand(2), conditioning)
    torch.testing.assert_close(found, drawn.prediction)


@compares("validation images", MAKERS)
def test_a_validation_picture_is_the_pipelines(drawn, monkeypatch):
    family, given = drawn.family, GIVEN.get(drawn.family.name, torch.clone)(drawn.noise)
    monkeypatch.setattr(family, "sampling", lambda request, also=family.sampling: {**also(request), "latents": given})
    request = SampleRequest(
        prompts=PROMPTS,
        seeds=(1, 2),
        width=SIZE[0],
        height=SIZE[1],
        steps=2,
        guidance=GUIDANCE,
        objective=native_objective(family),
    )
    with torch.no_grad():
        torch.testing.assert_close(family.sample(drawn.built(), request), drawn.pictures, atol=1e-5, rtol=0)


def test_latents_are_decoded_as_the_pipeline_does(drawn):
    with torch.no_grad():
        pixels = drawn.family.decode_latents(drawn.latents)
    torch.testing.assert_close(pixels, drawn.pictures, atol=1e-5, rtol=0)


def test_an_empty_caption_of_sana_has_no_instruction_before_it(family_of):
    family = family_of("sana")
    together, alone = family.encode_captions(["a fox", ""]), family.encode_captions(["a fox"])
    assert torch.equal(together["mask"].sum(1), torch.tensor([int(alone["mask"].sum()), 1]))


@pytest.mark.parametrize("kind", MAKERS)
def test_the_length_of_captions_can_be_chosen(family_of, kind):
    length = 48 if kind.startswith(("ideogram", "qwen image 2.1")) else 24
    tokens = family_of(kind, f"--tokenizer_max_length={length}").encode_captions(PROMPTS)["tokens"]
    assert tokens.shape[1] == length + 77 * kind.startswith("sd3")


@pytest.mark.parametrize("kind", ["flux", "flux schnell", "sd3", "auraflow", "lumina2", "z image", "anima"])
def test_times_are_moved_towards_noise_as_the_pipelines_scheduler_moves_them(family_of, kind):
    family, times = family_of(kind), [1.0, 0.75, 0.25]
    scheduler, tokens = family.frozen.scheduler, 48 * 64 // 4
    scheduler.set_timesteps(sigmas=times, mu=calculate_shift(tokens))
    torch.testing.assert_close(shift_times(torch.tensor(times), family.flow_shift.at(tokens)), scheduler.sigmas[:-1])


def test_an_image_counts_as_many_tokens_as_the_blocks_are_given(drawn):
    """Z-Image's first block is given them padded to a multiple of 32, that of Ideogram after 64 of text."""
    lengths, names = [], ("noise_refiner.0", "transformer_blocks.0", "joint_transformer_blocks.0", "x_embedder")
    names = {"krea2": ("img_in",), "qwen_image21": ("img_in",), "ideogram": ("input_proj",)}.get(drawn.family.name, names)
    model = drawn.built()
    block = next(module for name, module in reversed(list(model.named_modules())) if name in names)

    def note(module, arguments, keywords):
        states = signature(type(module).forward).bind(module, *arguments, **keywords).arguments
        given = states.get("hidden_states", states.get("x", states.get("input", states.get("latent"))))
        lengths.append(given.shape[1] if given.ndim == 3 else given.shape[2:].numel())

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        conditioning = drawn.family.encode_captions(PROMPTS)
        drawn.family.forward(model, drawn.noise, drawn.timesteps[:1].float().expand(2), conditioning)
    hook.remove()
    said = drawn.family.image_tokens(*SIZE)
    assert lengths[0] - 64 * (drawn.family.name == "ideogram") == (
        -(-said // 32) * 32 if drawn.family.name == "z_image" else said
    )


@pytest.mark.parametrize(
    ("kind", "shift"), [("flux", 3.158), ("flux2 klein", 3.158), ("sana", 1.878), ("lumina2", 3.158), ("anima", 3.158)]
)
def test_the_automatic_shift_goes_by_the_tokens_of_the_family(family_of, kind, shift, monkeypatch):
    """At 1024 pixels Flux.2 has 64 x 64 of them, each one latent pixel; Sana 32 x 32."""
    tiny = family_of(kind)
    published = {"flux": 8, "flux2": 16, "sana": 32, "lumina2": 8, "anima": 8}[tiny.name]  # the tiny autoencoders are shallower
    monkeypatch.setattr(type(tiny), "vae_scale", published)
    family = family_of(kind)
    config = resolve(schema_of(load_plugins()), ["--flow_schedule_auto_shift"], environment={})
    said = denoising_loss(config, family, "cpu").timesteps.shift.at(family.image_tokens(1024, 1024))
    assert said == pytest.approx(shift, abs=1e-3)


def test_the_shift_of_a_multistep_scheduler_is_known_and_ddpm_has_none(family_of):
    assert family_of("sana").flow_shift.at(1) == 3.0
    assert family_of("pixart sigma").flow_shift is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("flux", {"true_cfg_scale": 2.0}),
        ("flux schnell", {"guidance": 2.0}),
        ("flux2 klein", {}),
        ("flux2 klein distilled", {"guidance": 1.0}),
    ],
)
def test_a_picture_says_what_it_was_guided_with(family_of, kind, settings):
    request = SampleRequest(
        prompts=["a fox"], seeds=(1,), width=64, height=64, steps=2, guidance=3.5, objective=RectifiedFlow()
    )
    assert family_of(kind, "--flux_true_cfg_scale=2").sampling_settings(request) == settings


def test_the_tokenizer_of_flux2_dev_is_refused_where_it_cannot_be_made(family_of, tmp_path):
    if find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    folder = shutil.copytree(family_of("flux2 dev").components.folder, tmp_path / "dev")
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="which transformers makes only with torchvision"):
        Flux2(Components(folder), DiffusersOptions())


def test_a_scheduler_that_needs_a_package_is_refused_without_it(family_of, tmp_path, monkeypatch):
    folder = shutil.copytree(family_of("chroma").components.folder, tmp_path / "base")
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config | {"use_beta_sigmas": True}))
    monkeypatch.setattr("smalti_diffusers.families.chroma.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs scipy"):
        Chroma(Components(folder), DiffusersOptions())


def test_the_frozen_weights_of_krea_2_have_the_types_that_diffusers_gives_them(family_of):
    """Scales of norms are their difference from 1 there: in bf16 they would be rounded as their sum."""
    family = family_of("krea2", "--model_type=lora", "--lora_base_dtype=bf16", "--lora_targets=img_in")
    theirs = Krea2Transformer2DModel.from_pretrained(family.components.folder / "transformer", torch_dtype=torch.bfloat16)
    types = {name: each.dtype for name, each in theirs.named_parameters()}
    ours = {name.replace(".base_layer", ""): each for name, each in family.build_model().named_parameters()}
    assert {name: each.dtype for name, each in ours.items() if "lora_" not in name} == types
    assert {*types.values()} == {torch.bfloat16, torch.float32}


def test_the_distilled_krea_2_is_trained_with_the_shift_of_its_pipeline(family_of):
    assert (
        family_of("krea2 turbo").flow_shift.at(1)
        == family_of("krea2 turbo").flow_shift.at(4096)
        == pytest.approx(3.158, abs=1e-3)
    )
    assert family_of("krea2").flow_shift.at(4096) == pytest.approx(2.478, abs=1e-2)


def test_a_caption_that_is_too_long_for_ideogram_is_refused_with_its_beginning(family_of):
    with pytest.raises(
        UserError, match=r"the caption 'A red fox in the snow' is longer .*exceeds max_sequence_length=8"
    ) as refused:
        family_of("ideogram", "--tokenizer_max_length=8").encode_captions(["a", "A red fox in the snow"])
    assert "larger --tokenizer_max_length" in refused.value.fix


def test_ideogram_is_trained_at_the_noise_levels_of_its_pipelines_schedule(family_of):
    """Which are quantiles of sigmoid(mu + 1.5 N(0, 1)); mu grows with the image."""
    times, size = torch.linspace(0, 1, 5)[1:].double(), (1024, 768)
    sigmas = _logit_normal_sigmas(4, _resolution_aware_mu(*size, base_mu=0.0), std=1.5).flip(0)
    ours = shift_times(LogitNormal(std=1.5)(times), family_of("ideogram").flow_shift.at(size[0] * size[1] // 16**2))
    torch.testing.assert_close(ours[:3], sigmas[:3].double(), atol=1e-6, rtol=0)


def test_no_query_of_chroma_has_everything_masked(family_of):
    """Where kernels have NaN for a gradient."""
    subject, masks = FamilySubject(family_of("chroma")), []
    model = subject.model()
    for name, module in model.named_modules():
        if name.endswith(".attn"):
            note = lambda module, inputs, given: masks.append(given["attention_mask"])
            module.register_forward_pre_hook(note, with_kwargs=True)
    subject.predict(model, torch.randn(subject.latents.shape), [100.0, 500.0, 900.0], ["a red fox", "two boats", ""])
    assert len(masks) == 4
    for mask in masks:
        assert mask.any(dim=-1).all()
        assert not mask.all()


def test_the_modulation_of_chroma_never_trains(family_of):
    model = family_of("chroma", "--model_type=full").build_model()
    frozen = {name.partition(".")[0] for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen == {"distilled_guidance_layer"}


def test_a_pipeline_with_the_former_name_of_its_class_is_the_same(family_of, tmp_path):
    family = family_of("lumina2")
    folder = shutil.copytree(family.components.folder, tmp_path / "former")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "Lumina2Text2ImgPipeline"}))
    former = Lumina2(Components(folder), family.options)
    assert former.encoder_identity("texts") == family.encoder_identity("texts")
    assert torch.equal(former.encode_captions(["a fox"])["tokens"], family.encode_captions(["a fox"])["tokens"])
    assert (family.pipeline_changes(), former.pipeline_changes()) == ({}, {"_class_name": "Lumina2Pipeline"})


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("pixart sigma", "fp32"), ("pixart alpha", "bf16"), ("auraflow", "fp32"), ("bria", "fp32"), ("flux", "bf16")],
)
def test_the_autoencoder_of_stable_diffusion_xl_computes_in_fp32_on_accelerators(family_of, kind, dtype):
    family = family_of(kind)
    family.to("meta")
    assert family.encoder_identity("latents")["dtype"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]


def test_a_pipeline_of_another_family_is_refused(family_of):
    with pytest.raises(UserError, match="is a FluxPipeline, not a SanaPipeline"):
        Sana(family_of("flux").components, DiffusersOptions())


def test_a_prediction_that_the_pipeline_could_not_draw_with_is_refused(family_of):
    with pytest.raises(UserError, match="cannot be trained with the prediction 'epsilon'"):
        family_of("sd3", "--prediction_type=epsilon")


def test_pixart_is_trained_with_the_noise_of_its_scheduler(family_of):
    with pytest.raises(UserError, match="has the noise schedule linear"):
        family_of("pixart sigma", "--beta_schedule=scaled_linear")
    assert family_of("pixart sigma").beta_schedule == "linear"


def contract(kind, length=24):
    class Contract(FamilyContract):
        @pytest.fixture(autouse=True)
        def _families(self, family_of):
            self.family_of = family_of

        def family(self):
            return self.family_of(kind, "--init_from_config", f"--tokenizer_max_length={length}")

    return Contract


TestFlux = contract("flux")
TestChroma = contract("chroma")
TestBria = contract("bria")
TestErnie = contract("ernie")
TestFlux2 = contract("flux2 klein")
TestStableDiffusion3 = contract("sd3.5")
TestPixArt = contract("pixart alpha")
TestSana = contract("sana")
TestAuraFlow = contract("auraflow")
TestHiDream = contract("hidream small")
TestIdeogram = contract("ideogram", 64)
TestKrea2 = contract("krea2")
TestLumina2 = contract("lumina2", 240)  # which the instruction is a part of
TestLongCatImage = contract("longcat image")
TestOvisImage = contract("ovis image")
TestQwenImage = contract("qwen image")
TestQwenImage21 = contract("qwen image 2.1", 64)
TestZImage = contract("z image")


def test_a_flavour_that_the_family_does_not_have_is_refused_beside_a_path_too(tmp_path):
    plugins = load_plugins()
    flags = ["--model_family=flux", "--model_flavour=nonsense", f"--pretrained_model_name_or_path={tmp_path}"]
    with pytest.raises(UserError, match="flux has no flavour 'nonsense'"):
        find_family(resolve(schema_of(plugins), flags, environment={}), plugins)
