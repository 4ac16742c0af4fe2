"""`smalti adapter extract`: a LoRA from a complete model, exact at full rank, and the nearest one at a lower rank."""

import json
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from smalti_diffusers.lora.extraction import extracted, two_models
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.reading import AdapterFile
from support.commands import commands

PARTS = {"flux": "transformer", "sdxl": "unet"}
UNCHANGED = "attn2.to_v"


@pytest.fixture(scope="module", params=PARTS)
def pair(request, tmp_path_factory):
    """A pipeline, and one whose weights have changed, but for some."""
    root = tmp_path_factory.mktemp(request.param)
    base, random = getattr(tiny, request.param)(root / "base"), torch.Generator().manual_seed(2)
    shutil.copytree(base, root / "full")
    (file,) = (root / "full" / PARTS[request.param]).glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if UNCHANGED not in name:
            tensor += torch.randn(tensor.shape, generator=random) * 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    return request.param, base, root / "full"


def changes(found, base, full):
    """What the adapter adds to each weight beside what has changed, in fp64, as matrices."""
    for layer, parts in found.adapter.layers.items():
        change = full.get(f"{layer}.weight").double() - base.get(f"{layer}.weight").double()
        product = parts["lora_B"].double().flatten(1) @ parts["lora_A"].double().flatten(1)
        yield layer, product, change.flatten(1)


def test_at_full_rank_the_base_with_the_adapter_is_the_complete_model(pair):
    name, base, full = pair
    place, changed, weights = two_models(str(full), str(base))
    found = extracted(place, changed, weights, rank=10_000)
    assert found.error < 1e-6
    for layer, product, change in changes(found, weights, changed):
        assert UNCHANGED not in layer
        assert float((product - change).norm()) < 1e-6 * float(change.norm()), layer
    assert len(found.adapter.layers) > 10
    assert any(parts["lora_A"].ndim == 4 for parts in found.adapter.layers.values()) == (name == "sdxl")
    names = set(place.model.state_dict()) & set(weights.names()) - {f"{layer}.weight" for layer in found.adapter.layers}
    assert found.left.keys() == {each for each in names if UNCHANGED not in each}


def test_at_a_lower_rank_the_error_is_the_tail_of_the_singular_values(pair):
    _, base, full = pair
    place, changed, weights = two_models(str(full), str(base))
    found = extracted(place, changed, weights, rank=3)
    missing = total = 0.0
    for layer, product, change in changes(found, weights, changed):
        values = torch.linalg.svdvals(change)
        tail = float(values[3:].square().sum())
        assert float((product - change).square().sum()) == pytest.approx(tail, rel=1e-5, abs=1e-12), layer
        missing, total = missing + tail, total + float(values.square().sum())
    assert found.error == pytest.approx((missing / total) ** 0.5, rel=1e-6)
    assert 0.1 < found.error < 1


def test_by_energy_each_layer_has_the_lowest_rank_that_keeps_it(pair):
    _, base, full = pair
    place, changed, weights = two_models(str(full), str(base))
    found = extracted(place, changed, weights, rank=10_000, energy=0.8)
    ranks = set()
    for layer, product, change in changes(found, weights, changed):
        shares = torch.linalg.svdvals(change).square().cumsum(0) / change.square().sum()
        rank = len(found.adapter.layers[layer]["lora_A"])
        assert rank == int((shares < 0.8).sum()) + 1
        assert float(product.square().sum()) >= 0.8 * float(change.square().sum()) * (1 - 1e-5)
        ranks.add(rank)
    assert len(ranks) > 1


def test_the_command_writes_files_that_runs_and_tools_read(pair, tmp_path, capsys):
    _, base, full = pair
    words = ["extract", str(full), f"--base={base}", "--rank=4"]
    code, output, error = commands(capsys, "adapter")(*words, "--to", str(tmp_path / "style"), "--json")
    assert code == 0, error
    shown = json.loads(output)
    assert (shown["rank"], shown["text_encoders"]) == (4, [])
    assert shown["left"]
    place, changed, weights = two_models(str(full), str(base))
    found = extracted(place, changed, weights, rank=4)
    file = AdapterFile(AdapterHeader(tmp_path / "style"), place.family, place.model, place.config)
    for layer, product, _ in changes(found, weights, changed):
        down, up = file.matrices(layer)
        torch.testing.assert_close(up.flatten(1).double() @ down.flatten(1).double(), product, rtol=1e-5, atol=1e-7)
    words += ["--targets=to_q,to_k", "--energy=0.9", "--format=kohya"]
    code, output, error = commands(capsys, "adapter")(*words, "--to", str(tmp_path / "kohya"))
    assert code == 0, error
    assert "of the change of all these layers is missing" in output
    assert "text_encoder" not in output
    layers = AdapterFile(AdapterHeader(tmp_path / "kohya"), place.family, place.model, place.config).layers
    assert {layer.rpartition(".")[2] for layer in layers} <= {"to_q", "to_k"}


def test_a_text_encoder_that_changed_too_is_named(pair, tmp_path, capsys):
    _, base, full = pair
    tuned = shutil.copytree(full, tmp_path / "tuned")
    (file,) = (tuned / "text_encoder_2").glob("*.safetensors")
    tensors = load_file(file)
    tensors[max(tensors)] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    words = ("extract", str(tuned), f"--base={base}", "--rank=4", "--to", str(tmp_path / "style"))
    code, output, error = commands(capsys, "adapter")(*words)
    assert code == 0, error
    assert "note: text_encoder_2 changed too, which the adapter lacks" in output


def test_two_equal_models_and_another_family_are_refused(pair, tmp_path, capsys):
    name, base, full = pair
    run = commands(capsys, "adapter")
    code, _, error = run("extract", str(base), f"--base={base}", "--rank=4", "--to", str(tmp_path / "none"))
    assert (code, "differs from" in error) == (2, True), error
    other = "sdxl" if name == "flux" else "flux"
    made = getattr(tiny, other)(tmp_path / "other")
    code, _, error = run("extract", str(made), f"--base={base}", "--rank=4", "--to", str(tmp_path / "none"))
    assert (code, "--base=PIPELINE" in error) == (2, True), error
    words = ("extract", str(full), f"--base={base}", "--rank=4", "--device=nowhere", "--to", str(tmp_path / "none"))
    code, _, error = run(*words)
    assert (code, "nowhere cannot compute this" in error) == (2, True), error
    assert not (tmp_path / "none").exists()
