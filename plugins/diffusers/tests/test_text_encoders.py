"""Adapters of SDXL's text encoders: what is computed, beside a loop of diffusers, transformers and peft; their files."""

import json
import shutil

import pytest
import tiny
import torch
import torch.nn.functional as F
from adapters import make_adapter, tensors
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from test_init_lora import started

from smalti import UserError
from smalti.config import OptimizerOptions
from smalti.config.resolution import resolve
from smalti.models.blocks import find_blocks
from smalti.models.size_conditioning import SizeConditioning
from smalti.models.weights import materialise, without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.loss import objective_of
from smalti.training.optim.lr_schedule import build_scheduler
from smalti.training.optim.optimizers import AdamW, matrices, parameter_groups
from smalti_diffusers.lora import kept_texts
from smalti_diffusers.lora.kept_texts import can_keep_texts
from smalti_diffusers.lora.kinds import parted
from smalti_plan.counting import count_facts
from smalti_testing import check_family
from smalti_testing.family_subject import FamilySubject
from support.commands import commands
from support.whole import only_whole, some

TRAINED = "--train_text_encoder"
LAYER = "encoder.layers.0.self_attn.q_proj"
CAPTIONS = ["a red fox", "", "two boats " * 20]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.sdxl(tmp_path_factory.mktemp("encoders") / "base")


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("made"), "sdxl", TRAINED, base=base)


def of_encoders(found):
    return {name: each for name, each in found.items() if name.startswith("text_encoder")}


def file_of(folder):
    (file,) = folder.glob("*.safetensors")
    return file


@only_whole("plugins/diffusers/tests/test_lora.py::test_the_family_with_an_adapter_keeps_the_contract")
def test_the_family_keeps_the_contract(made):
    check_family(made.subject.family)


def test_without_changes_captions_are_encoded_as_the_pipeline_does(base, made):
    pipeline = StableDiffusionXLPipeline.from_pretrained(base)
    family = made.subject.family
    with torch.no_grad(), family.adapter_strength(made.model, 0):
        found = family.embedded(made.model, family.encode_negative_prompts(CAPTIONS))
        tokens, _, pooled, _ = pipeline.encode_prompt(prompt=CAPTIONS, do_classifier_free_guidance=False)
        zeros = family.embedded(made.model, family.encode_captions([""]))
    assert torch.equal(found["tokens"], tokens)
    assert torch.equal(found["pooled"], pooled)
    assert not zeros["tokens"].any()
    assert not zeros["pooled"].any()


def test_encoders_that_have_stopped_have_no_part_in_the_gradient(made):
    family = made.subject.family
    model = materialise(made.subject.bare(), family.weights(0), "cpu")
    found = []
    for learn in (True, False):
        model.encoders_learn = learn
        latents = torch.ones(1, *family.latent_shape(64, 32))
        given = family.encode_captions(CAPTIONS[:1]) | family.encode_size_conditioning([SizeConditioning.of((64, 32))], 64, 32)
        family.forward(model, latents, torch.full((1,), 500.0), given).square().mean().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        model.zero_grad()
    before, after = found
    assert before.keys() == after.keys(), "DDP waits for all"
    theirs = of_encoders(after).keys()
    assert any(before[name].any() for name in theirs)
    assert not any(after[name].any() for name in theirs)
    assert all(torch.equal(before[name], after[name]) for name in after.keys() - theirs)


def test_encoders_that_have_stopped_encode_each_text_once(made, monkeypatch):
    """The rows are those of the text alone, with the same bits whether they are kept or not, for all ranks and resumes."""
    family, size = made.subject.family, SizeConditioning.of((64, 32))
    model = materialise(made.subject.bare(), family.weights(0), "cpu").train()
    model.encoders_learn = False
    encoders = [model.text_encoder, model.text_encoder_2]
    assert can_keep_texts(encoders)
    encoded = []
    for encoder in encoders:
        encoder.register_forward_hook(lambda encoder, given, output: encoded.append(len(given[0])))

    def step(captions):
        model.zero_grad()
        given = family.encode_captions(captions) | family.encode_size_conditioning([size] * len(captions), 64, 32)
        latents = torch.ones(len(captions), *family.latent_shape(64, 32))
        predicted = family.forward(model, latents, torch.full((len(captions),), 500.0), given)
        predicted.square().mean().backward()
        return [predicted.detach(), *(each.grad for each in model.parameters() if each.requires_grad)]

    together = step(CAPTIONS)
    found = {}
    for limit in (kept_texts.LIMIT, 0):
        monkeypatch.setattr(kept_texts, "LIMIT", limit)
        model.kept = kept_texts.KeptTexts([each for one in encoders for each in one.parameters() if each.requires_grad])
        encoded.clear()
        found[limit] = [*step(CAPTIONS), *step([CAPTIONS[1], CAPTIONS[0], CAPTIONS[1]])]
        assert encoded == [1] * 2 * (len(CAPTIONS) if limit else 2 * len(CAPTIONS))
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))
    torch.testing.assert_close(found[0][: len(together)], together)
    zeros = [each.grad for name, each in model.named_parameters() if each.requires_grad and name.startswith("text_encoder")]
    assert zeros
    assert not any(each.any() for each in zeros), "DDP waits for all"
    encoded.clear()
    with torch.no_grad():  # as the model without its adapter is called
        family.embedded(model, family.encode_captions(CAPTIONS))
    family.embedded(model.eval(), family.encode_captions(CAPTIONS))  # with averaged weights, perhaps
    assert encoded == [len(CAPTIONS)] * 4


def test_texts_are_not_kept_where_rows_depend_on_more_or_are_made_by_all_ranks(made):
    model = materialise(made.subject.bare(), made.subject.family.weights(0), "cpu")
    assert can_keep_texts([model.text_encoder])
    layer = next(each for each in model.text_encoder.modules() if type(each).__name__ == "CLIPAttention")
    layer.dropout = 0.1
    assert not can_keep_texts([model.text_encoder])
    layer.dropout = 0.0
    layer.register_parameter("of_another_rank", torch.nn.Parameter(torch.empty(0)))
    assert not can_keep_texts([model.text_encoder])


# --- a loop of diffusers, transformers and peft ---------------------------------------------------------------------

RATE, RATE_OF_ENCODERS, STEPS, LIMIT = 1e-3, 3e-4, 20, 1.0


def batches(family):
    """Latents, noise and fractions of each step."""
    random = torch.Generator().manual_seed(4)
    shape = (len(CAPTIONS), *family.latent_shape(64, 32))
    for _ in range(STEPS):
        yield *(torch.randn(shape, generator=random) for _ in range(2)), torch.rand(len(CAPTIONS), generator=random)


def smaltis(made):
    """The losses and norms of gradients of each step, the gradients of the first, and the trained tensors."""
    options = resolve(
        schema_of(load_plugins()),
        ["--model_family=toy", f"--learning_rate={RATE}", "--lr_scheduler=constant", "--lr_warmup_steps=0"],
        environment={},
    )[OptimizerOptions]
    family, model = made.subject.family, materialise(made.subject.bare(), made.subject.family.weights(0), "cpu").train()
    objective, size = objective_of(family_config(), family), SizeConditioning.of((64, 32))
    ratio = RATE_OF_ENCODERS / RATE
    groups = parameter_groups(model, 0.01, matrices(model), lambda name: ratio if name.startswith("text_encoder") else 1.0)
    optimizer = AdamW(groups, lr=RATE)
    build_scheduler(optimizer, options, STEPS, 0)
    losses, gradients = [], {}
    for latents, noise, fractions in batches(family):
        t = objective.times(fractions)
        given = family.encode_captions(CAPTIONS) | family.encode_size_conditioning([size] * len(CAPTIONS), 64, 32)
        predicted = family.forward(model, objective.add_noise(latents, noise, t), objective.timesteps(t), given)
        loss = objective.compare(predicted, objective.target(latents, noise, t), t).mean()
        loss.backward()
        trained = [each for each in model.parameters() if each.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, LIMIT)
        losses += [loss.detach(), norm]
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients, {name: model.get_parameter(name).detach() for name in gradients}


def family_config():
    return resolve(schema_of(load_plugins()), ["--model_family=toy"], environment={})


def theirs(base, made):
    """The same of parts that are loaded by diffusers and transformers, with adapters of peft."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(base)
    parts = {"unet": pipeline.unet, "text_encoder": pipeline.text_encoder, "text_encoder_2": pipeline.text_encoder_2}
    first, names = made.subject.family.weights(0), {}
    for part, module in parts.items():
        module.requires_grad_(False).train()
        targets = ["to_q", "to_k", "to_v", "to_out.0"] if part == "unet" else ["q_proj", "k_proj", "v_proj", "out_proj"]
        unused = ["encoder.layers.1"] if part == "text_encoder" else None
        settings = {"r": 4, "lora_alpha": 6, "target_modules": targets, "exclude_modules": unused and r".*layers\.1\..*"}
        inject_adapter_in_model(LoraConfig(**settings), module, adapter_name="default")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                own = name if part == "unet" else f"{part}.text_model.{name.removeprefix('text_model.')}"
                parameter.data = first.get(own).clone()
                names[own] = parameter
    encoders = [each for name, each in names.items() if name.startswith("text_encoder")]
    others = [each for name, each in names.items() if not name.startswith("text_encoder")]
    groups = [{"params": others, "lr": RATE}, {"params": encoders, "lr": RATE_OF_ENCODERS}]
    optimizer, schedule = torch.optim.AdamW(groups, weight_decay=0.01), DDPMScheduler.from_config(pipeline.scheduler.config)
    times = torch.tensor([[32.0, 64.0, 0.0, 0.0, 32.0, 64.0]]).expand(len(CAPTIONS), -1)
    given = torch.tensor([float(caption != "") for caption in CAPTIONS])
    losses, gradients = [], {}
    for latents, noise, fractions in batches(made.subject.family):
        steps = ((fractions * 1000 - 1e-3).ceil() - 1).clamp(0, 999).long()
        tokens, _, pooled, _ = pipeline.encode_prompt(prompt=CAPTIONS, do_classifier_free_guidance=False)
        added = {"text_embeds": pooled * given[:, None], "time_ids": times}
        noisy = schedule.add_noise(latents, noise, steps)
        predicted = pipeline.unet(noisy, steps, tokens * given[:, None, None], added_cond_kwargs=added).sample
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        losses += [loss.detach(), torch.nn.utils.clip_grad_norm_(list(names.values()), LIMIT)]
        gradients = gradients or {name: each.grad.clone() for name, each in names.items()}
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients, {name: each.detach() for name, each in names.items()}


def test_twenty_steps_are_those_of_a_loop_of_diffusers_and_peft(base, made):
    ours, others, first = smaltis(made), theirs(base, made), made.subject.family.weights(0)
    torch.testing.assert_close(ours[0], others[0], atol=1e-5, rtol=1e-5)
    assert ours[1].keys() == others[1].keys()
    for choose in (of_encoders, dict):
        gradients, expected = choose(ours[1]), choose(others[1])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)
        moved = torch.cat([(ours[2][name] - first.get(name)).flatten() for name in gradients])
        rest = torch.cat([(ours[2][name] - others[2][name]).flatten() for name in gradients])
        assert float(moved.norm()) > 1e3 * float(rest.norm())
    assert sum(float(each.abs().max()) > 0 for each in of_encoders(ours[1]).values()) == 12


def test_plans_count_the_encoders_among_what_is_in_memory(base, made, tmp_path):
    found = []
    for family in (make_adapter(tmp_path, "sdxl", base=base).subject.family, made.subject.family):
        with without_weights():
            model = family.build_model()
        blocks = find_blocks(model, family.block_classes())
        found.append(count_facts(family, model, blocks, width=64, height=64, bf16=False, kind="cpu"))
    frozen = sum(
        each.numel() for part in ("text_encoder", "text_encoder_2") for each in load_file(file_of(base / part)).values()
    )
    adapters = sum(each.numel() for name, each in made.model.named_parameters() if parted(name) and name.startswith("text_"))
    assert found[1].trained - found[0].trained == adapters
    assert found[1].parameters - found[0].parameters == frozen + adapters
    assert found[1].frozen.bytes - found[0].frozen.bytes == 4 * frozen


# --- files ----------------------------------------------------------------------------------------------------------


def test_names_have_the_prefix_that_one_class_of_transformers_lacks(base, made, tmp_path):
    names = {name.partition(".lora_")[0] for name in tensors(made.export(tmp_path / "style"))}
    assert {f"{part}.text_model.{LAYER}" for part in ("text_encoder", "text_encoder_2")} <= names
    held = {part: load_file(file_of(base / part)) for part in ("text_encoder", "text_encoder_2")}
    assert f"{LAYER}.weight" in held["text_encoder"]
    assert f"text_model.{LAYER}.weight" in held["text_encoder_2"]
    older = shutil.copytree(base, tmp_path / "older")
    prefixed = {f"text_model.{name}": each for name, each in held["text_encoder"].items()}
    save_file(prefixed, file_of(older / "text_encoder"), metadata={"format": "pt"})
    for config in (older / part / "config.json" for part in held):  # as the published ones have it
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    found = make_adapter(tmp_path, "sdxl", TRAINED, base=older)
    assert {each.dtype for name, each in found.model.named_parameters() if parted(name)} == {torch.float32}
    torch.testing.assert_close(found.predict(found.model), made.predict(made.model), atol=0, rtol=0)


@pytest.mark.parametrize("format", ["diffusers", "kohya", "comfyui"])
def test_a_file_starts_a_run_with_the_same_change_of_every_weight(made, tmp_path, format):
    folder = made.export(tmp_path / "style", format=format)
    found = started(made, folder, TRAINED)
    assert len(of_encoders(found.deltas)) == 4 * 3
    assert found.deltas.keys() == made.deltas.keys()
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)
    if format != "diffusers":
        assert {name.split("_text")[0] for name in tensors(folder) if "_te" in name} == {"lora_te1", "lora_te2"}


@pytest.mark.parametrize("lacking", ["text_encoder.text_model.", "text_encoder_2.text_model."])
def test_names_without_the_prefix_are_known_and_layers_without_effect_are_left_out(made, tmp_path, lacking):
    held = tensors(made.export(tmp_path / "style"))
    part = lacking.partition(".")[0]
    renamed = {name.replace(lacking, f"{part}."): each for name, each in held.items()}
    idle = f"text_encoder.text_model.{LAYER}".replace(".0.", ".1.")
    renamed |= {f"{idle}.lora_A.weight": torch.ones(4, 32), f"{idle}.lora_B.weight": torch.ones(32, 4)}
    save_file(renamed, tmp_path / "other.safetensors")
    found = started(made, tmp_path / "other.safetensors", TRAINED)
    assert found.deltas.keys() == made.deltas.keys()
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)


def test_the_settings_in_a_file_are_those_of_each_part(made, tmp_path):
    held = tensors(made.export(tmp_path / "style"))
    parts = ("unet", "text_encoder", "text_encoder_2")
    settings = {
        f"{part}.{name}": value for part in parts for name, value in (("r", 4), ("lora_alpha", 4 if part == "unet" else 2))
    }
    save_file(held, tmp_path / "half.safetensors", metadata={"lora_adapter_metadata": json.dumps(settings)})
    found = started(made, tmp_path / "half.safetensors", TRAINED)
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta * (0.5 if layer in of_encoders(made.deltas) else 1))


@pytest.mark.parametrize("kind", some(["lokr", "loha", "dora"], "lokr"))
def test_other_kinds_of_adapters_go_through_files_too(base, tmp_path, kind):
    made = make_adapter(tmp_path, "sdxl", TRAINED, f"--lora_kind={kind}", base=base)
    found = started(made, made.export(tmp_path / "style", format="kohya"), TRAINED, f"--lora_kind={kind}")
    torch.testing.assert_close(found.predict(found.model), made.predict(made.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("single", [False, True])
def test_a_merged_pipeline_encodes_and_predicts_as_the_run(base, made, tmp_path, single):
    folder = made.export(tmp_path / "whole", merge=True, single_file=single)
    if single:
        pipeline = StableDiffusionXLPipeline.from_single_file(str(file_of(folder)), config=str(base))
    else:
        pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    family = made.subject.family
    with torch.no_grad():
        tokens, _, pooled, _ = pipeline.encode_prompt(prompt=CAPTIONS, do_classifier_free_guidance=False)
        found = family.embedded(made.model, family.encode_negative_prompts(CAPTIONS))
        before = StableDiffusionXLPipeline.from_pretrained(base).encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    torch.testing.assert_close(tokens, found["tokens"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pooled, found["pooled"], atol=1e-4, rtol=1e-4)
    assert float((before[0] - tokens).abs().max()) > 1e-2
    plain = FamilySubject(make_adapter(tmp_path, "sdxl", base=base).subject.family)
    noisy = torch.randn(plain.latents.shape, generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens, "pooled": pooled} | plain.family.encode_size_conditioning(
        [SizeConditioning.of((64, 32))] * 3, 64, 32
    )
    raw = family.encode_negative_prompts(CAPTIONS) | {"time_ids": given["time_ids"]}
    with torch.no_grad():
        expected = family.forward(made.model, noisy, torch.tensor([100.0, 500.0, 900.0]), raw)
        drawn = plain.family.forward(pipeline.unet, noisy, torch.tensor([100.0, 500.0, 900.0]), given)
    torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=1e-4)


def test_adapters_in_files_are_converted_merged_and_resized_with_their_encoders(capsys, made, tmp_path):
    file = file_of(made.export(tmp_path / "style", format="kohya"))
    run = commands(capsys, "adapter")
    model = f"--model={made.base}"
    code, shown, error = run("check", file, model, "--json")
    assert code == 0, error
    assert json.loads(shown)["layers"] == len(made.deltas)
    assert json.loads(shown)["tools"]["ComfyUI"] == "reads it"
    for words, change in (
        (("convert", file, "--format=diffusers"), 1.0),
        (("merge", file, file, "--strength=1", "--strength=0.5"), 1.5),
        (("resize", file, "--rank=8"), 1.0),
    ):
        code, _, error = run(*words, "--to", tmp_path / words[0], model)
        assert code == 0, error
        found = started(made, file_of(tmp_path / words[0]), TRAINED)
        for layer, delta in made.deltas.items():
            torch.testing.assert_close(found.deltas[layer], delta * change, atol=1e-5, rtol=1e-4)
    code, _, error = run("convert", file, "--to", tmp_path / "peft", "--format=peft", model)
    assert (code, "also changes text_encoder and text_encoder_2" in error) == (2, True), error


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model_type=full", TRAINED], "this run trains the complete model"),
        (["--model_type=lora", "--text_encoder_lr=1e-5"], "this run does not train them"),
        (["--model_type=lora", "--train_text_encoder_steps=5"], "this run does not train them"),
        (["--model_type=lora", TRAINED, "--train_text_encoder_steps=5", "--train_text_encoder_frac=0.5"], "both say"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, reason):
    from smalti_diffusers.checks import problems

    config = resolve(schema_of(load_plugins()), ["--model_family=sdxl", *words], environment={})
    assert [problem for problem in problems(config) if reason in problem.message]


def test_families_whose_encoders_are_not_trained_say_so(tmp_path):
    with pytest.raises(UserError, match="the text encoders of flux cannot be trained"):
        make_adapter(tmp_path, "flux", TRAINED)


def test_what_is_left_out_of_a_file_can_be_trained(made, tmp_path):
    file = file_of(made.export(tmp_path / "style", format="kohya"))
    words = ["--model_family=sdxl", "--model_type=lora", f"--init_lora={file}"]
    notices = {
        given: resolve(schema_of(load_plugins()), [*words, *given], environment={}).notices for given in ((), (TRAINED,))
    }
    assert any("the 12 layers of text encoders in the file are left out; --train_text_encoder" in each for each in notices[()])
    assert not any("text encoders" in each for each in notices[TRAINED,])


def test_parameters_of_adapters_are_named_alike_in_every_version(made):
    names = {name for name, _ in made.model.named_parameters() if parted(name)}
    assert {name.split(".")[1] for name in names if name.startswith("text_encoder")} == {"text_model"}
