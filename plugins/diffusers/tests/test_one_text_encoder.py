"""Adapters of the one text encoder of Stable Diffusion 1 and 2: what is computed, beside diffusers and peft; files; a run."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from adapters import family as family_at, make_adapter, tensors
from diffusers import DDPMScheduler, DiffusionPipeline, StableDiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from pictured import difference
from safetensors.torch import load_file
from test_init_lora import started

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.loss import objective_of
from smalti_diffusers.lora.kinds import parted
from smalti_testing import check_family
from smalti_testing.family_subject import FamilySubject
from support.commands import commands
from support.whole import only_whole, some

TRAINED = "--train_text_encoder"
CAPTIONS = ["a red fox", "", "two boats " * 20]
FAMILIES = ("sd1x", "sd2x")
ENCODER = "text_encoder.text_model.encoder.layers."


@pytest.fixture(scope="module", params=some(FAMILIES, "sd1x"))
def made(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return make_adapter(root, request.param, TRAINED, base=getattr(tiny, request.param)(root / "base"))


def of_encoder(found):
    return {name: each for name, each in found.items() if name.startswith("text_encoder.")}


@only_whole("plugins/diffusers/tests/test_lora.py::test_the_family_with_an_adapter_keeps_the_contract")
def test_the_family_keeps_the_contract(made):
    check_family(made.subject.family)


def test_without_changes_captions_are_encoded_as_the_pipeline_does(made):
    pipeline, family = StableDiffusionPipeline.from_pretrained(made.base), made.subject.family
    with torch.no_grad(), family.adapter_strength(made.model, 0):
        found = family.embedded(made.model, family.encode_captions(CAPTIONS))["tokens"]
        expected, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert float((family.embedded(made.model, family.encode_captions(CAPTIONS))["tokens"] - expected).abs().max()) > 1e-2


def test_loss_and_gradients_are_those_of_diffusers_and_peft(made):
    family, random = made.subject.family, torch.Generator().manual_seed(4)
    latents, noise = (torch.randn(3, *family.latent_shape(64, 32), generator=random) for _ in range(2))
    steps = torch.tensor([10, 400, 990])
    model = materialise(made.subject.bare(), family.weights(0), "cpu").train()
    config = resolve(schema_of(load_plugins()), ["--model_family=toy"], environment={})
    objective, t = objective_of(config, family), steps
    noisy = objective.add_noise(latents, noise, t)
    predicted = family.forward(model, noisy, objective.timesteps(t), family.encode_captions(CAPTIONS))
    loss = objective.compare(predicted, objective.target(latents, noise, t), t).mean()
    loss.backward()
    ours = {name: each.grad for name, each in model.named_parameters() if parted(name)}

    pipeline, first, theirs = StableDiffusionPipeline.from_pretrained(made.base), family.weights(0), {}
    for part, ends in (
        ("unet", ["to_q", "to_k", "to_v", "to_out.0"]),
        ("text_encoder", ["q_proj", "k_proj", "v_proj", "out_proj"]),
    ):
        module = getattr(pipeline, part).requires_grad_(False).train()
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6, target_modules=ends), module, adapter_name="default")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                own = name if part == "unet" else f"{part}.text_model.{name.removeprefix('text_model.')}"
                parameter.data, theirs[own] = first.get(own).clone(), parameter
    schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    tokens, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
    answer = pipeline.unet(schedule.add_noise(latents, noise, steps), steps, tokens).sample
    wanted = schedule.get_velocity(latents, noise, steps) if family.prediction == "v_prediction" else noise
    expected = F.mse_loss(answer, wanted)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name].grad, atol=1e-6, rtol=1e-4)
    assert sum(float(each.abs().max()) > 0 for each in of_encoder(ours).values()) == 4 * 2


@pytest.mark.parametrize("trained", [False, True])
def test_with_clip_skip_tokens_are_the_states_before_the_last_layers(made, tmp_path, trained):
    flags = ["--clip_skip=1", *([TRAINED] if trained else [])]
    found = make_adapter(tmp_path, made.name, *flags, base=made.base)
    family, pipeline = found.subject.family, StableDiffusionPipeline.from_pretrained(made.base)
    ids = pipeline.tokenizer(CAPTIONS, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad(), family.adapter_strength(found.model, 0):
        tokens = family.embedded(found.model, family.encode_captions(CAPTIONS))["tokens"]
        first, _ = pipeline.text_encoder(ids, output_hidden_states=True).hidden_states[1:]
        encoder = getattr(pipeline.text_encoder, "text_model", pipeline.text_encoder)
        assert torch.equal(tokens, encoder.final_layer_norm(first))
    assert {name.split(".")[4] for name in of_encoder(found.deltas)} == ({"0"} if trained else set()), "the other has no effect"
    found.export(tmp_path / "style", format="comfyui")
    assert found.usages["ComfyUI"].endswith("\nwith the node CLIP Set Last Layer at -2")


def test_clip_skip_is_of_families_with_a_choice_and_leaves_a_layer(made):
    from smalti_diffusers.checks import problems

    words = ["--clip_skip=2", "--model_type=lora"]
    for name, count in (("sdxl", 1), (made.name, 0)):
        config = resolve(schema_of(load_plugins()), [f"--model_family={name}", *words], environment={})
        assert sum("clip_skip is for" in each.message for each in problems(config)) == count
    with pytest.raises(UserError, match="the text encoder has 2 layers"):
        family_at(made.name, made.base, *words)


@pytest.mark.parametrize("format", some(["diffusers", "kohya", "comfyui"], "kohya"))
def test_a_file_starts_a_run_with_the_same_change_of_every_weight(made, tmp_path, format):
    folder = made.export(tmp_path / "style", format=format)
    found = started(made, folder, TRAINED)
    assert len(of_encoder(found.deltas)) == 4 * 2
    assert found.deltas.keys() == made.deltas.keys()
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)
    begin = ENCODER if format == "diffusers" else f"lora_te_{ENCODER.partition('.')[2].replace('.', '_')}"
    assert sum(name.startswith(begin) for name in tensors(folder)) == 4 * 2 * (2 if format == "diffusers" else 3)


@pytest.mark.parametrize("format", some(["diffusers", "kohya"], "diffusers"))
def test_diffusers_loads_the_file_into_the_encoder(made, tmp_path, format):
    pipeline = StableDiffusionPipeline.from_pretrained(made.base)
    pipeline.load_lora_weights(made.export(tmp_path / "style", format=format), adapter_name="style")
    family = made.subject.family
    with torch.no_grad():
        found, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
        expected = family.embedded(made.model, family.encode_captions(CAPTIONS))["tokens"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("single", [False, True])
def test_a_merged_pipeline_encodes_and_predicts_as_the_run(made, tmp_path, single):
    if single and made.name != "sd1x":
        pytest.skip("models of Stable Diffusion 2 are not exported as one file")
    folder = made.export(tmp_path / "whole", merge=True, single_file=single)
    if single:
        [file] = folder.glob("*.safetensors")
        pipeline = StableDiffusionPipeline.from_single_file(str(file), config=str(made.base), safety_checker=None)
    else:
        pipeline = StableDiffusionPipeline.from_pretrained(folder)
    family, plain = made.subject.family, FamilySubject(family_at(made.name, made.base))
    noisy = torch.randn(plain.latents.shape, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([100.0, 500.0, 900.0])
    with torch.no_grad():
        tokens, _ = pipeline.encode_prompt(CAPTIONS, "cpu", 1, False)
        expected = family.forward(made.model, noisy, times, family.encode_captions(CAPTIONS))
        found = plain.family.forward(pipeline.unet, noisy, times, {"tokens": tokens})
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_adapters_in_files_are_read_without_a_run(capsys, made, tmp_path):
    file = next(made.export(tmp_path / "style", format="kohya").glob("*.safetensors"))
    code, _, error = commands(capsys, "adapter")("convert", file, f"--model={made.base}", "--to", tmp_path / "other")
    assert code == 0, error
    [converted] = (tmp_path / "other").glob("*.safetensors")
    assert sum(name.startswith(ENCODER) for name in load_file(converted)) == 4 * 2 * 2


def test_a_run_draws_what_a_pipeline_with_its_export_draws(made, train, capsys, tmp_path):
    options = {
        "model_family": made.name,
        "model_type": "lora",
        "lora_rank": 4,
        "train_text_encoder": True,
        "text_encoder_lr": 2e-2,
        "learning_rate": 5e-2,
        "pretrained_model_name_or_path": made.base,
        "validation_base_model": True,
    }
    code, output = train(tmp_path / "run", **options)
    assert code == 0, output
    code, _, error = commands(capsys, "checkpoint", "export")(tmp_path / "run", "--to", tmp_path / "style")
    assert code == 0, error
    pipeline = DiffusionPipeline.from_pretrained(made.base)
    assert difference(pipeline, tmp_path / "run", step=0, edge=32) <= 1
    pipeline.load_lora_weights(tmp_path / "style")
    assert difference(pipeline, tmp_path / "run", edge=32) <= 1
    pipeline.text_encoder.disable_adapters()
    assert difference(pipeline, tmp_path / "run", edge=32) > 1
