"""Exported adapters against their readers: alpha is not the rank, and every reader gets the same change of the model."""

import re

import pytest
import torch
from adapters import ALPHA, FAMILIES, RANK, make_adapter, opened, tensors
from comfyui_names import KNOWN
from compared import compares
from diffusers import (
    ChromaTransformer2DModel,
    CosmosTransformer3DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Ideogram4Pipeline,
    Krea2Transformer2DModel,
    Lumina2Transformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.loaders import single_file_utils
from published import ANIMA, FLUX_DEV, PUBLISHED

from smalti import UserError
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.state import PortableState
from smalti_diffusers.lora.formats import TOOLS, kohya_name, original_layers, write_adapter
from smalti_export.folder import NewExport, TrainedWeights
from smalti_testing.strategies import SingleRank
from support.whole import some

LOADED_BY_DIFFUSERS = [
    *((name, "diffusers") for name in FAMILIES if TOOLS[name].diffusers),
    *((name, "comfyui") for name in FAMILIES if TOOLS[name].diffusers and TOOLS[name].comfyui == "diffusers"),
    *((name, "kohya") for name in ("sd1x", "sd2x", "sdxl", "flux2", "qwen_image", "z_image")),
    *((name, "comfyui") for name in ("sd1x", "sd2x", "sdxl")),
]
LOADED = [
    *(
        ("anima", "diffusers"),
        ("flux", "diffusers"),
        ("sana", "diffusers"),
        ("flux", "comfyui"),
        ("flux2", "kohya"),
        ("qwen_image", "kohya"),
        ("sd1x", "kohya"),
    ),
    *(("sdxl", format) for format in ("diffusers", "kohya", "comfyui")),
]


@compares("formats of adapters", LOADED_BY_DIFFUSERS)
@pytest.mark.parametrize(("name", "format"), some(LOADED_BY_DIFFUSERS, *LOADED))
def test_load_lora_weights_reads_the_file_with_the_strength_of_the_run(adapter, tmp_path, name, format):
    made = adapter(name)
    expected = made.predict(made.model)
    pipeline = opened(made.base)
    before = made.predict(pipeline.components[made.subject.family.part])
    pipeline.load_lora_weights(made.export(tmp_path / "style", format=format))
    found = made.predict(pipeline.components[made.subject.family.part])
    assert (expected - before).norm() > 100 * (expected - found).norm()


@compares("formats of adapters", ["bria", "cosmos", "longcat_image", "ovis_image", "pixart", "sdxl"], "peft")
@pytest.mark.parametrize("name", some(("bria", "cosmos", "longcat_image", "ovis_image", "pixart", "sdxl"), "pixart", "sdxl"))
def test_peft_reads_its_own_format(adapter, tmp_path, name):
    from peft import PeftModel

    made = adapter(name)
    base = opened(made.base).components[made.subject.family.part]
    loaded = PeftModel.from_pretrained(base, made.export(tmp_path / "style", format="peft"))
    torch.testing.assert_close(made.predict(loaded.base_model.model), made.predict(made.model), atol=1e-4, rtol=0)


@compares("formats of adapters", KNOWN, "comfyui")
@pytest.mark.parametrize("name", KNOWN)
def test_comfyui_knows_every_layer_by_its_name_in_diffusers(adapter, tmp_path, name):
    made = adapter(name)
    found = tensors(made.export(tmp_path / "style", format="comfyui"))
    layers = {key.removeprefix("transformer.").partition(".lora_")[0] for key in found}
    assert [layer for layer in layers if not any(re.fullmatch(known, layer) for known in KNOWN[name])] == []
    assert layers == made.deltas.keys()
    # ComfyUI takes alpha to be the rank where a file has no tensor `.alpha`.
    for layer, delta in made.deltas.items():
        down, up = (found[f"transformer.{layer}.lora_{each}.weight"] for each in "AB")
        torch.testing.assert_close(up @ down, delta)


def test_comfyui_reads_ernie_by_the_names_of_its_own_state_dict(adapter, tmp_path):
    """Which are those of diffusers, after a prefix: under `transformer.` it knows none of them."""
    made = adapter("ernie")
    found = tensors(made.export(tmp_path / "style", format="comfyui"))
    assert {key.partition(".")[0] for key in found} == {f"lora_unet_{layer.replace('.', '_')}" for layer in made.deltas}
    for layer, delta in made.deltas.items():
        down, up, alpha = (found[f"{kohya_name(layer)}.{part}"] for part in ("lora_down.weight", "lora_up.weight", "alpha"))
        torch.testing.assert_close(up @ down * (alpha / len(down)), delta)


class Original(dict):
    """Tensors of an original checkpoint: those that were not given, such as norms, are zeros."""

    def pop(self, key, *default):
        return super().pop(key, self.__missing__(key))

    def __missing__(self, key):
        return torch.zeros(21504)  # rows of the largest layer of Flux, which is split into parts of fixed sizes


HIDDEN = {
    "chroma": (ChromaTransformer2DModel, PUBLISHED["chroma"][1] | {"num_layers": 1, "num_single_layers": 1}),
    "flux": (FluxTransformer2DModel, FLUX_DEV | {"num_layers": 1, "num_single_layers": 1}),
    "sd3": (SD3Transformer2DModel, {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}),
    "krea2": (Krea2Transformer2DModel, {"num_layers": 2}),
    "lumina2": (Lumina2Transformer2DModel, {"num_layers": 1}),
    "anima": (CosmosTransformer3DModel, ANIMA | {"num_layers": 2, "num_attention_heads": 2}),
}
"""Models of the published widths, which diffusers' conversions of single files take for granted; on the meta device."""


def converted_chroma(checkpoint):
    """With one of the layers that the conversion counts."""
    checkpoint["distilled_guidance_layer.layers.0.in_layer.bias"] = checkpoint["of no matter"]
    return single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers(checkpoint)


CONVERSIONS = {
    "chroma": converted_chroma,
    "flux": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
    "sd3": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    "krea2": single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers,
    "lumina2": single_file_utils.convert_lumina2_to_diffusers,
    "anima": single_file_utils.convert_cosmos_transformer_checkpoint_to_diffusers,
}


def exported(name, adapter, root, format):
    """Such a model, an adapter of its attention and feed-forward layers as it is in a checkpoint, and its file in a format."""
    cls, config = HIDDEN[name]
    with torch.device("meta"):
        model = cls.from_config(config)
    ends = (*adapter(name).subject.family.targets, "proj_out", "net.0.proj", "net.2")
    random = torch.Generator().manual_seed(3)
    trained = {}
    for key, module in model.named_modules():
        if "." in key and key.endswith(tuple(f".{end}" for end in ends)):
            trained[f"{key}.lora_A.default.weight"] = torch.randn(RANK, module.weight.shape[1], generator=random)
            trained[f"{key}.lora_B.default.weight"] = torch.randn(module.weight.shape[0], RANK, generator=random)
    saved = save(root, Snapshot(step=1, state=PortableState(model=trained)), SingleRank())
    weights = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision=None)
    folder = NewExport(root / "made", weights, {"rank": RANK, "alpha": ALPHA}, lambda done, total: None)
    write_adapter(folder, format, name, "transformer", model, dict(model.config))
    return model, trained, tensors(root / "made")


def assert_same_change(trained, layer, up, down):
    """What a layer adds to random inputs, which takes less time to compare than the product of both matrices."""
    first, second = (trained[f"{layer}.lora_{each}.default.weight"] for each in "AB")
    inputs = torch.randn(first.shape[1], 4, generator=torch.Generator().manual_seed(0))
    wanted = second @ (first @ inputs) * (ALPHA / RANK)
    torch.testing.assert_close(up @ (down @ inputs), wanted, atol=1e-3 * float(wanted.std()), rtol=1e-4)


@compares("formats of adapters", CONVERSIONS, "kohya")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_layers_of_kohya_are_those_of_the_original_model(adapter, tmp_path, name):
    """Row by row: diffusers' conversion of an original checkpoint takes lora_up apart again, and says which layer is where."""
    model, trained, found = exported(name, adapter, tmp_path, "kohya")
    layers = {key.partition(".lora_")[0] for key in trained}
    names = {kohya_name(each): each for each in original_layers(model, dict(model.config))}
    files = sorted({key.partition(".")[0] for key in found})
    ups = Original({f"{names[key]}.weight": found[f"{key}.lora_up.weight"] for key in files})
    numbers = Original({key: torch.full((len(up), 1), float(number)) for number, (key, up) in enumerate(ups.items())})
    rows, places = (CONVERSIONS[name](each) for each in (ups, numbers))
    assert not ups  # every name was one of the original's
    for layer in layers:
        (place,) = places[f"{layer}.weight"].unique().int().tolist()
        down, alpha = found[f"{files[place]}.lora_down.weight"], float(found[f"{files[place]}.alpha"])
        assert_same_change(trained, layer, rows[f"{layer}.weight"] * (alpha / len(down)), down)


def test_diffusers_reads_the_kohya_format_of_flux(adapter, tmp_path):
    _, trained, found = exported("flux", adapter, tmp_path, "kohya")
    state = FluxPipeline.lora_state_dict(found)
    layers = {key.partition(".lora_")[0] for key in trained}
    assert {key.partition(".lora_")[0].removeprefix("transformer.") for key in state} == layers
    for layer in layers:
        down, up = (state[f"transformer.{layer}.lora_{each}.weight"] for each in "AB")
        assert_same_change(trained, layer, up, down)


@compares("formats of adapters", ["ideogram"], "kohya")
@pytest.mark.parametrize("name", ["ideogram"])
def test_layers_of_kohya_are_those_that_diffusers_converts_from_the_original_model(adapter, tmp_path, name):
    made = adapter(name)
    found = tensors(made.export(tmp_path / "style", format="kohya"))
    names = {kohya_name(each): each for each in original_layers(made.model, dict(made.subject.family.model_config))}
    parts = {key: key.partition(".") for key in found}
    state = {f"diffusion_model.{names[layer]}.{part}": found[key] for key, (layer, _, part) in parts.items()}
    state = Ideogram4Pipeline.lora_state_dict(state)
    for layer, delta in made.deltas.items():
        down, up = (state[f"transformer.{layer}.lora_{each}.weight"] for each in "AB")
        torch.testing.assert_close(up @ down, delta)


@pytest.mark.parametrize(
    ("name", "format", "tool"),
    [
        ("anima", "diffusers", "diffusers"),
        ("flux", "diffusers", "diffusers"),
        ("sdxl", "peft", "diffusers and peft"),
        ("pixart", "peft", "diffusers and peft"),
    ],
)
def test_the_lines_that_an_export_shows_load_it(adapter, tmp_path, name, format, tool):
    made = adapter(name)
    made.export(tmp_path / "style", format=format)
    *lines, last = made.usages[tool].replace('.to("cuda")', "").replace("bfloat16", "float32").splitlines()
    names = {}
    exec("\n".join(lines), names)
    compile(last.replace("{prompt}", '"a photo"'), "last line", "exec")
    found = made.predict(names["pipeline"].components[made.subject.family.part])
    torch.testing.assert_close(found, made.predict(made.model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "format"), [("flux", "comfyui"), ("sdxl", "kohya")])
def test_the_file_that_is_copied_to_comfyui_is_there(adapter, tmp_path, name, format):
    adapter(name).export(tmp_path / "style", format=format)
    assert adapter(name).usages["ComfyUI"].startswith(f"cp {tmp_path}/style/style.safetensors ComfyUI/models/loras/")
    assert (tmp_path / "style" / "style.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "format", "reason"),
    [
        ("pixart", "diffusers", "no load_lora_weights"),
        ("sana", "comfyui", "ComfyUI has no names for adapters of sana"),
        ("sana", "kohya", "kohya's tools have no adapters of sana"),
        ("auraflow", "kohya", "kohya's tools have no adapters of auraflow"),
    ],
)
def test_a_format_that_no_tool_reads_is_refused_with_those_that_one_reads(adapter, tmp_path, name, format, reason):
    with pytest.raises(UserError, match=reason) as refused:
        adapter(name).export(tmp_path / "style", format=format)
    assert "--format=peft" in refused.value.fix


def test_a_layer_without_a_name_in_the_format_is_refused(tmp_path):
    made = make_adapter(tmp_path, "flux", "--lora_targets=to_q,norm_out.linear")
    with pytest.raises(UserError, match=r"has no name for norm_out\.linear"):
        made.export(tmp_path / "style", format="kohya")
