"""A run that starts from a LoRA file, in any format: it predicts what the model with that LoRA predicts."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from adapters import ALPHA, FAMILIES, RANK, Adapter, family, make_adapter, tensors
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from smalti import ConfigError, UserError
from smalti.config.resolution import resolve
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti_diffusers.lora.formats import FORMATS, TOOLS
from smalti_diffusers.lora.header import TRAINED_ALPHA, AdapterHeader
from smalti_export.command import export as export_command
from smalti_testing.family_subject import FamilySubject
from support.whole import some


def written(name):
    tools = TOOLS[name]
    known = {"diffusers": tools.diffusers, "peft": True, "comfyui": tools.comfyui, "kohya": tools.kohya}
    return [format for format in FORMATS if known[format]]


def started(made, file, *flags) -> Adapter:
    """What a run of the same family starts with."""
    words = ["--model_type=lora", f"--init_lora={file}", *flags]
    subject = FamilySubject(family(made.name, made.base, *words))
    model = materialise(subject.bare(), subject.family.weights(5), "cpu").eval()
    return Adapter(name=made.name, base=made.base, subject=subject, model=model, checkpoint=made.checkpoint)


EVERY = [(name, format) for name in FAMILIES for format in written(name)]
KEPT = [
    ("flux", "diffusers"),
    ("flux", "comfyui"),
    ("pixart", "peft"),
    ("sdxl", "peft"),
    ("sdxl", "kohya"),
    ("qwen_image", "kohya"),
]


@pytest.mark.parametrize(("name", "format"), some(EVERY, *KEPT))
def test_what_is_exported_starts_a_run_with_the_same_change_of_every_weight(adapter, tmp_path, name, format):
    made = adapter(name)
    found = started(made, made.export(tmp_path / "style", format=format))
    assert (found.subject.family.lora.rank, found.subject.family.lora.alpha) == (RANK, ALPHA)
    assert found.deltas.keys() == made.deltas.keys()
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)


def rewritten(folder, file, rename, change=None, **metadata):
    """The tensors of a file under other names."""
    found = {rename(name): tensor for name, tensor in tensors(folder).items()}
    save_file(found | (change or {}), file, metadata=metadata or None)
    return file


SPELLINGS = {
    "peft in a process": lambda name: name.replace("transformer.", "").replace(".weight", ".default.weight"),
    "ai-toolkit": lambda name: name.replace("transformer.", "diffusion_model."),
    "diffusers before peft": lambda name: name.replace(".lora_A", ".lora.down").replace(".lora_B", ".lora.up"),
    "OneTrainer": lambda name: (
        "lora_transformer_"
        + name.removeprefix("transformer.").partition(".lora_")[0].replace(".", "_")
        + name[name.index(".lora_") :].replace("lora_A", "lora_down").replace("lora_B", "lora_up")
    ),
}


@pytest.mark.parametrize("tool", SPELLINGS)
def test_names_of_other_tools_are_known(adapter, tmp_path, tool):
    made = adapter("flux")
    file = rewritten(made.export(tmp_path / "style"), tmp_path / "other.safetensors", SPELLINGS[tool])
    found = started(made, file)
    assert found.subject.family.lora.alpha == RANK  # the file does not say alpha any more
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)


def test_a_layer_that_another_trainer_joined_is_one_adapter_of_each_of_its_parts(adapter, tmp_path):
    made = adapter("flux")
    size = made.deltas["transformer_blocks.0.attn.to_q"].shape[0]
    random = torch.Generator().manual_seed(2)
    down, up = (torch.randn(shape, generator=random) for shape in ((RANK, size), (3 * size, RANK)))
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    file = tmp_path / "joined.safetensors"
    save_file(
        {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0).bfloat16()}, file
    )
    found = started(made, file, "--lora_targets=to_q,to_k,to_v")
    deltas = (up @ down * (2 / RANK)).chunk(3)
    for layer, delta in zip(("to_q", "to_k", "to_v"), deltas, strict=True):
        torch.testing.assert_close(found.deltas[f"transformer_blocks.0.attn.{layer}"], delta)
    assert float(found.deltas["transformer_blocks.1.attn.to_q"].abs().max()) == 0


@settings(max_examples=4, deadline=None)
@given(ranks=st.lists(st.integers(1, 5), min_size=2, max_size=2), alpha=st.floats(0.25, 32, width=16), data=st.data())
def test_any_ranks_and_alphas_add_the_same(adapter, tmp_path_factory, ranks, alpha, data):
    made = adapter("sdxl")
    layers = sorted(made.deltas)[:2]
    contents, expected = {}, {}
    for layer, rank in zip(layers, ranks, strict=True):
        rows, columns = made.deltas[layer].shape
        random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        down, up = torch.randn(rank, columns, generator=random), torch.randn(rows, rank, generator=random)
        name = f"lora_unet_{layer.replace('.', '_')}"
        contents |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(alpha)}
        expected[layer] = up @ down * (alpha / rank)
    file = tmp_path_factory.mktemp("any") / "any.safetensors"
    save_file(contents, file)
    header = AdapterHeader(file)
    if max(ranks) > header.rank:
        return  # refused with the rank to give
    found = started(made, file)
    for layer, delta in expected.items():
        torch.testing.assert_close(found.deltas[layer], delta, atol=1e-3, rtol=1e-4)


def test_rank_and_alpha_of_the_run_must_be_those_of_the_file(adapter, tmp_path):
    file = adapter("sdxl").export(tmp_path / "style", format="kohya")
    words = ["--model_family=sdxl", "--model_type=lora", f"--init_lora={file}", "--lora_rank=32", "--lora_alpha=1"]
    with pytest.raises(ConfigError) as refused:
        resolve(schema_of(load_plugins()), words, environment={})
    assert "--lora_rank: is '32', and rank in init_lora says 4" in str(refused.value)
    assert "--lora_alpha: is '1', and alpha in init_lora says 6.0" in str(refused.value)


def refusal(tmp_path, contents):
    file = tmp_path / "other.safetensors"
    save_file(contents, file)
    return file


REFUSED = {
    "half a LoHa": ({"lora_unet_x.hada_w1_a": torch.ones(2, 2)}, "has of lora_unet_x only hada_w1_a"),
    "no LoRA": ({"weight": torch.ones(2, 2)}, "has no layers of a LoRA"),
    "half of it": ({"transformer.x.lora_A.weight": torch.ones(2, 2)}, r"without transformer\.x\.lora_B\.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_no_lora_is_refused_by_name_before_the_launch(tmp_path, what):
    contents, reason = REFUSED[what]
    with pytest.raises(UserError, match=reason):
        AdapterHeader(refusal(tmp_path, contents))


def test_a_file_that_is_cut_off_or_missing_or_a_pickle_is_refused(adapter, tmp_path):
    whole = next(adapter("flux").export(tmp_path / "style").glob("*.safetensors"))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "x.ckpt").write_bytes(b"x")
    for path, reason in (
        (cut, "is not a valid safetensors file"),
        (tmp_path / "x.ckpt", "not a safetensors"),
        (tmp_path / "no", "exist"),
    ):
        with pytest.raises(UserError, match=reason):
            AdapterHeader(path)


def test_what_is_left_out_of_a_file_is_noticed(adapter, tmp_path):
    more = {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(2, 2),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.ones(2, 2),
        "lora_unet_conv_in.diff_b": torch.ones(2),
    }
    whole = adapter("sdxl").export(tmp_path / "style", format="kohya")
    file = rewritten(whole, tmp_path / "more.safetensors", str, more)
    words = ["--model_family=sdxl", "--model_type=lora", f"--init_lora={file}"]
    notices = resolve(schema_of(load_plugins()), words, environment={}).notices
    assert any("the 1 layers of text encoders in the file are left out" in each for each in notices)
    assert any("lora_unet_conv_in.diff_b in init_lora is not used" in each for each in notices)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_a_user_error_and_nothing_else(adapter, tmp_path_factory, data):
    root = tmp_path_factory.mktemp("damaged")
    file = next(adapter("flux").export(root / "style").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with suppress(UserError):
        header = AdapterHeader(file)
        assert header.rank > 0
        assert isinstance(header.alpha, float)


def test_an_alpha_that_is_not_a_number_is_refused(tmp_path):
    layer = "transformer.transformer_blocks.0.attn.to_q"
    save_file(
        {f"{layer}.lora_{each}.weight": torch.ones(4, 4) for each in "AB"}, tmp_path / "x.safetensors", {TRAINED_ALPHA: ":.0"}
    )
    with pytest.raises(UserError, match=r"has the alpha ':\.0' in its metadata"):
        assert AdapterHeader(tmp_path / "x.safetensors").alpha


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path):
    other = adapter("sd3").export(tmp_path / "style")
    with pytest.raises(UserError, match="layers that the model does not have"):
        started(adapter("z_image"), other)
    file = refusal(
        tmp_path, {f"transformer.transformer_blocks.0.attn.to_q.lora_{each}.weight": torch.ones(4, 4) for each in "AB"}
    )
    with pytest.raises(UserError, match="is an adapter of another model"):
        started(adapter("flux"), file)


def test_layers_that_the_run_would_not_adapt_are_refused_with_the_targets_to_give(adapter, tmp_path):
    made = make_adapter(tmp_path, "flux", "--lora_targets=to_q,norm_out.linear", base=adapter("flux").base)
    file = made.export(tmp_path / "style")
    with pytest.raises(UserError, match="does not adapt") as refused:
        started(made, file)
    assert refused.value.fix == "--lora_targets=attn.to_q,norm_out.linear"
    found = started(made, file, refused.value.fix)
    assert found.deltas.keys() == made.deltas.keys()


def test_a_run_on_two_sharded_ranks_starts_from_the_file_and_resumes_and_exports_without_it(adapter, tmp_path, train):
    made = adapter("flux")
    file = next(made.export(tmp_path / "style", format="kohya").glob("*.safetensors"))
    options = {
        "model_family": "flux",
        "model_type": "lora",
        "pretrained_model_name_or_path": made.base,
        "learning_rate": 1e-9,
        "checkpoint_step_interval": 1,
        "validation_step_interval": 0,
        "num_processes": 2,
        "train_batch_size": 2,
        "fsdp_enable": True,
        "allow_dataset_oversubscription": True,
    }
    code, output = train(tmp_path / "run", **options, init_lora=file, max_train_steps=1)
    assert code == 0, output
    file.unlink()
    code, output = train(tmp_path / "run", **options, init_lora=file, max_train_steps=2)
    assert (code, "leave --init_lora out" in output) == (2, True), output
    code, output = train(tmp_path / "run", **options, lora_rank=RANK, lora_alpha=ALPHA, max_train_steps=2)
    assert (code, "at step 1" in output) == (0, True), output
    done = CliRunner().invoke(export_command, [str(tmp_path / "run"), "--to", str(tmp_path / "made")])
    assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "made" / "pytorch_lora_weights.safetensors")
    for layer, delta in made.deltas.items():
        down, up = (found[f"transformer.{layer}.lora_{each}.weight"] for each in "AB")
        torch.testing.assert_close(up @ down, delta, atol=1e-4, rtol=1e-4)
    assert json.loads((tmp_path / "run" / "launch.json").read_text())["values"]["lora_rank"] == RANK


@pytest.mark.parametrize(("name", "reason"), [("a" * 3000, "opened: File name too long"), ("none", "none does not exist")])
def test_a_name_without_a_file_is_told(name, reason):
    with pytest.raises(UserError, match=reason):
        AdapterHeader(Path(name))
