"""`smalti adapter`: which tools read a file, conversions without loss, sums of adapters, lower ranks."""

import json

import pytest
import torch
from adapters import make_adapter
from safetensors.torch import load_file, save_file
from test_adapter_kind_formats import CONVOLUTIONS, bases, expected, read
from test_init_lora import started

from smalti_diffusers.lora.formats import kohya_name, original_layers
from support.commands import commands
from support.whole import some


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By kind, an adapter of a tiny SDXL."""
    found = {}
    for kind in ("lora", "dora", "lokr", "loha"):
        base = found["lora"].base if found else None
        flags = (f"--lora_kind={kind}", CONVOLUTIONS, *(("--lokr_factor=2",) if kind == "lokr" else ()))
        found[kind] = make_adapter(tmp_path_factory.mktemp(kind), "sdxl", *flags, base=base)
    return found


@pytest.fixture
def adapter_command(capsys, made):
    """adapter_command("check", FILE, ...): the exit code, and what --json prints or the error."""

    def run(*words, model=True):
        place = (f"--model={made['lora'].base}",) if model else ()
        code, output, error = commands(capsys, "adapter")(*map(str, words), *place, "--json")
        return code, json.loads(output) if code == 0 else error

    return run


def file_of(folder):
    (file,) = folder.glob("*.safetensors")
    return file


CONVERTED = [
    (kind, start, format)
    for kind in ("lora", "lokr", "loha")
    for start, format in (("diffusers", "kohya"), ("kohya", "peft"), ("peft", "comfyui"))
]
KEPT = (("lora", "diffusers", "kohya"), ("lora", "peft", "comfyui"), ("lokr", "kohya", "peft"), ("loha", "peft", "comfyui"))


@pytest.mark.parametrize(("kind", "start", "format"), some(CONVERTED, *KEPT))
def test_a_converted_file_changes_the_weights_as_before(adapter_command, made, tmp_path, kind, start, format):
    start = "peft" if kind != "lora" and start == "diffusers" else start
    file = file_of(made[kind].export(tmp_path / "style", format=start))
    code, shown = adapter_command("convert", file, "--to", tmp_path / "other", f"--format={format}")
    assert code == 0, shown
    found = started(made[kind], file_of(tmp_path / "other"), CONVOLUTIONS)
    torch.testing.assert_close(found.predict(found.model), made[kind].predict(made[kind].model), atol=1e-4, rtol=1e-4)


def test_a_dora_is_converted_for_tools_that_need_no_base(adapter_command, made, tmp_path):
    file = file_of(made["dora"].export(tmp_path / "style", format="kohya"))
    code, shown = adapter_command("convert", file, "--to", tmp_path / "other", "--format=diffusers")
    assert code == 0, shown
    found = started(made["dora"], file_of(tmp_path / "other"), CONVOLUTIONS)
    torch.testing.assert_close(found.predict(found.model), made["dora"].predict(made["dora"].model), atol=1e-4, rtol=1e-4)
    code, error = adapter_command("convert", file, "--to", tmp_path / "third", "--format=comfyui")
    assert (code, "needs the weights of its base" in error) == (2, True)
    assert not (tmp_path / "third").exists()


def test_merged_adapters_change_the_weights_as_all_together(adapter_command, made, tmp_path):
    adapter = made["lora"]
    first = adapter.export(tmp_path / "first", format="kohya")
    other = make_adapter(tmp_path, "sdxl", "--lora_targets=to_q,to_v", "--lora_alpha=1", base=adapter.base)
    second = other.export(tmp_path / "second")
    words = ("merge", file_of(first), file_of(second), "--to", tmp_path / "both", "--strength=1", "--strength=-0.5")
    code, shown = adapter_command(*words, "--format=kohya")
    assert code == 0, shown
    file, deltas = load_file(file_of(tmp_path / "both")), {**other.deltas}
    names = original_layers(adapter.subject.family.meta_model, dict(adapter.subject.family.meta_model.config))
    for original, (layer,) in names.items():
        wanted = sum(
            (each.deltas[layer] * strength for each, strength in ((adapter, 1), (other, -0.5)) if layer in each.deltas),
            torch.zeros(1),
        )
        if layer in adapter.deltas or layer in deltas:
            zeros = torch.zeros_like(wanted)
            torch.testing.assert_close(read(zeros, file, kohya_name(original), comfyui=True), wanted, atol=1e-5, rtol=1e-4)


def test_a_resized_adapter_is_the_nearest_of_its_rank(adapter_command, made, tmp_path):
    adapter = made["lora"]
    file = file_of(adapter.export(tmp_path / "style", format="kohya"))
    code, shown = adapter_command("resize", file, "--rank=2", "--to", tmp_path / "small", "--format=kohya")
    assert (code, shown["rank"]) == (0, 2)
    values = {layer: torch.linalg.svdvals(delta.flatten(1)) for layer, delta in adapter.deltas.items()}
    kept = sum(float(each[:2].square().sum()) for each in values.values())
    assert shown["kept"] == pytest.approx(kept / sum(float(each.square().sum()) for each in values.values()), rel=1e-4)
    small = load_file(file_of(tmp_path / "small"))
    names = original_layers(adapter.subject.family.meta_model, dict(adapter.subject.family.meta_model.config))
    for original, (layer,) in names.items():
        if layer in values:
            delta = adapter.deltas[layer]
            rest = (read(torch.zeros_like(delta), small, kohya_name(original), comfyui=True) - delta).norm()
            torch.testing.assert_close(rest, values[layer][2:].norm(), atol=1e-5, rtol=1e-3)


def test_a_lokr_becomes_a_lora_of_the_rank_that_it_has(adapter_command, made, tmp_path):
    adapter = made["lokr"]
    file = file_of(adapter.export(tmp_path / "style", format="comfyui"))
    code, shown = adapter_command("resize", file, "--rank=200", "--to", tmp_path / "lora", "--format=kohya")
    assert (code, shown["kind"], round(shown["kept"], 6)) == (0, "lora", 1.0)
    found, before = load_file(file_of(tmp_path / "lora")), bases(adapter)
    names = original_layers(adapter.subject.family.meta_model, dict(adapter.subject.family.meta_model.config))
    for original, (layer,) in names.items():
        if layer in before:
            torch.testing.assert_close(
                read(before[layer], found, kohya_name(original), comfyui=True), expected(adapter)[layer], atol=1e-5, rtol=1e-4
            )


def test_check_names_the_kind_the_model_and_the_tools(adapter_command, made, tmp_path):
    code, shown = adapter_command("check", file_of(made["lokr"].export(tmp_path / "style", format="kohya")))
    assert (code, shown["kind"], shown["family"], shown["rank"]) == (0, "lokr", "sdxl", 4)
    assert shown["tools"] == {
        "diffusers": "does not read it: diffusers loads no LoKr into the pipeline of sdxl",
        "ComfyUI": "reads it",
        "kohya": "reads it",
        "peft": "does not read it: smalti adapter convert --format=peft",
    }
    code, shown = adapter_command("check", file_of(made["dora"].export(tmp_path / "dora", format="kohya")))
    assert "not exact" in shown["tools"]["ComfyUI"]


def test_check_finds_a_strength_that_comfyui_does_not_see(adapter_command, tmp_path):
    made = make_adapter(tmp_path, "flux")
    found = load_file(file_of(made.export(tmp_path / "style")))
    settings = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})
    save_file(found, tmp_path / "half.safetensors", metadata={"lora_adapter_metadata": settings})
    code, shown = adapter_command("check", tmp_path / "half.safetensors", f"--model={made.base}", model=False)
    assert (code, shown["family"], shown["tools"]["diffusers"]) == (0, "flux", "reads it")
    assert shown["tools"]["ComfyUI"] == "reads it at 2 times the strength: smalti adapter convert --format=comfyui"


def test_a_published_model_is_found_by_its_layers(adapter_command, tmp_path):
    layer = "transformer.transformer_blocks.0.attn.to_q"
    matrices = {f"{layer}.lora_A.weight": torch.ones(2, 3072), f"{layer}.lora_B.weight": torch.ones(3072, 2)}
    save_file(matrices, tmp_path / "a.safetensors")
    code, shown = adapter_command("check", tmp_path / "a.safetensors", model=False)
    assert (code, shown["model"]) == (0, "flux dev")
    save_file({"some.lora_A.weight": torch.ones(2, 4), "some.lora_B.weight": torch.ones(4, 2)}, tmp_path / "b.safetensors")
    code, error = adapter_command("check", tmp_path / "b.safetensors", "--model=pixart", model=False)
    assert (code, "layers that the model does not have" in error) == (2, True)


def test_what_cannot_be_done_is_refused(adapter_command, made, tmp_path):
    lokr = file_of(made["lokr"].export(tmp_path / "lokr", format="kohya"))
    dora = file_of(made["dora"].export(tmp_path / "dora", format="kohya"))
    for words, reason in (
        (("merge", lokr, lokr), "the sum of a LoKr"),
        (("resize", dora, "--rank=2"), "a DoRA also changes lengths"),
        (("merge", lokr, "--strength=1", "--strength=1"), "2 strengths for 1 file"),
        (("convert", lokr, "--format=diffusers"), "diffusers loads no LoKr into the pipeline of sdxl"),
    ):
        code, error = adapter_command(*words, "--to", tmp_path / "no")
        assert (code, reason in error) == (2, True), error
    assert not (tmp_path / "no").exists()
