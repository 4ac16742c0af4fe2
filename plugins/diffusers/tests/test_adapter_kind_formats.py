"""Files of LoKr, LoHa and DoRA by the formulas of their readers, which are written here from what these do; and read back."""

import pytest
import torch
from adapters import family, make_adapter, tensors
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from test_init_lora import started

from smalti import ConfigError, UserError
from smalti_diffusers.lora.adapter import adapter_scales
from smalti_diffusers.lora.formats import kohya_name, original_layers
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.kinds import changed, parted
from smalti_diffusers.lora.readers import readers
from smalti_diffusers.lora.shapes import factorised
from support.whole import some

CONVOLUTIONS = "--lora_targets=to_q,to_k,conv1,proj_in,ff.net.2"
KINDS = {
    "lora": ("--lora_rank_pattern=to_k=2",),
    "rslora": ("--use_rslora",),
    "dora": ("--lora_kind=dora", "--lora_rank_pattern=to_k=2"),
    "lokr": ("--lora_kind=lokr", "--lokr_factor=2", "--lora_rank_pattern=to_k=2"),
    "lokr full": ("--lora_kind=lokr", "--lokr_full"),
    "loha": ("--lora_kind=loha", "--lora_rank_pattern=to_k=2"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """adapter(family, kind): made once."""
    found = {}

    def give(name, kind):
        if (name, kind) not in found:
            base = next((each.base for (other, _), each in found.items() if other == name), None)
            flags = (*KINDS[kind], *((CONVOLUTIONS,) if name == "sdxl" else ()))
            found[name, kind] = make_adapter(tmp_path_factory.mktemp("made"), name, *flags, base=base)
        return found[name, kind]

    return give


def bases(made):
    """The weights of the layers that have an adapter, without it, in fp64: what is compared is the file alone."""
    found = made.subject.family.base_weights(0)
    return {layer: found.get(f"{layer}.weight").double() for layer in adapter_scales(made.model)}


def expected(made):
    """The weights of these layers with the adapter."""
    parts, scales = {}, adapter_scales(made.model)
    for name, parameter in made.model.named_parameters():
        if place := parted(name):
            parts.setdefault(place[0], {})[place[1]] = parameter.detach().double()
    return {layer: changed(weight, parts[layer], scales[layer]) for layer, weight in bases(made).items()}


def norms(weight):
    return weight.flatten(1).norm(dim=1).view(-1, *(1,) * (weight.ndim - 1))


def read(weight, file, name, *, comfyui):
    """What ComfyUI, or LyCORIS in kohya's tools, make of a weight."""

    def get(part):
        tensor = file.get(f"{name}.{part}")
        return None if tensor is None else tensor.double()

    alpha, rank = get("alpha"), None
    lengths = get("dora_scale")
    if any(f"{name}.lokr_{part}" in file for part in ("w1", "w1_a")):
        first, second = get("lokr_w1"), get("lokr_w2")
        if first is None:
            first, rank = get("lokr_w1_a") @ get("lokr_w1_b"), len(get("lokr_w1_b"))
        if second is None:
            second, rank = get("lokr_w2_a") @ get("lokr_w2_b"), len(get("lokr_w2_b"))
        if second.ndim == 4:
            first = first[:, :, None, None]
        product = torch.kron(first, second)
    elif f"{name}.hada_w1_a" in file:
        product, rank = (get("hada_w1_a") @ get("hada_w1_b")) * (get("hada_w2_a") @ get("hada_w2_b")), len(get("hada_w1_b"))
    else:
        up, down = (
            next(tensor for end in ends if (tensor := get(f"{end}.weight")) is not None)
            for ends in (("lora_up", "lora_B"), ("lora_down", "lora_A"))
        )
        product, rank = up.flatten(1) @ down.flatten(1), len(down)
    scale = float(alpha) / rank if alpha is not None and rank is not None else 1.0
    new = weight + scale * product.reshape(weight.shape)
    if lengths is not None:
        assert lengths.shape == norms(weight).shape
        new = new * (lengths / norms(weight if comfyui else new))
    return new.to(weight.dtype)


CARRIED = [
    *(("sdxl", kind, format) for kind in KINDS for format in ("comfyui", "kohya")),
    *(("flux", kind, "comfyui") for kind in KINDS),
    ("flux", "dora", "kohya"),
    *(("qwen_image", kind, "kohya") for kind in ("lokr", "loha")),
]


KEPT = [
    *(("sdxl", kind, "comfyui") for kind in KINDS),
    *(("sdxl", kind, "kohya") for kind in ("dora", "lokr")),
    *(("flux", "lokr full", "comfyui"), ("flux", "dora", "kohya"), ("qwen_image", "lokr", "kohya")),
]


@pytest.mark.parametrize(("name", "kind", "format"), some(CARRIED, *KEPT))
def test_readers_change_each_weight_as_the_run_did(adapter, tmp_path, name, kind, format):
    made = adapter(name, kind)
    file = tensors(made.export(tmp_path / "style", format=format))
    wanted, before = expected(made), bases(made)
    model, comfyui = made.subject.family.meta_model, format == "comfyui"
    own_names = format == "comfyui" and name == "flux"
    layers = {each: (each,) for each in wanted} if own_names else original_layers(model, dict(model.config))
    compared = set()
    for original, members in layers.items():
        if not wanted.keys() & set(members):
            continue
        whole = torch.cat([before.get(each, torch.zeros_like(before[members[0]])) for each in members])
        written = f"transformer.{original}" if own_names else kohya_name(original)
        found = read(whole, file, written, comfyui=comfyui)
        torch.testing.assert_close(found, torch.cat([wanted[each] for each in members]), atol=1e-6, rtol=0)
        compared.update(members)
    assert compared == wanted.keys()


DIFFUSERS = [
    ("flux2", "lokr"),
    ("flux2", "lokr full"),
    ("z_image", "lokr"),
    ("flux", "dora"),
    ("sdxl", "dora"),
    ("flux", "lora"),
]


@pytest.mark.parametrize(
    ("name", "kind"), some(DIFFUSERS, ("flux2", "lokr full"), ("z_image", "lokr"), ("flux", "dora"), ("sdxl", "dora"))
)
def test_load_lora_weights_reads_them(adapter, tmp_path, name, kind):
    made = adapter(name, kind)
    pipeline = DiffusionPipeline.from_pretrained(made.base)
    pipeline.load_lora_weights(made.export(tmp_path / "style"))
    found = made.predict(pipeline.components[made.subject.family.part])
    torch.testing.assert_close(found, made.predict(made.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", some(KINDS, "rslora", "dora", "lokr", "loha"))
def test_peft_reads_them(adapter, tmp_path, kind):
    from peft import PeftModel

    made = adapter("sdxl", kind)
    base = DiffusionPipeline.from_pretrained(made.base).components["unet"]
    loaded = PeftModel.from_pretrained(base, made.export(tmp_path / "style", format="peft"))
    torch.testing.assert_close(made.predict(loaded.base_model.model), made.predict(made.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", some(KINDS, "rslora", "dora", "lokr", "loha"))
def test_the_merged_pipeline_predicts_as_the_model_with_the_adapter(adapter, tmp_path, kind):
    made = adapter("sdxl", kind)
    merged = DiffusionPipeline.from_pretrained(made.export(tmp_path / "whole", merge=True)).components["unet"]
    torch.testing.assert_close(made.predict(merged), made.predict(made.model), atol=1e-4, rtol=1e-4)


STARTS = [(kind, format) for kind in KINDS for format in ("comfyui", "kohya", "peft")]
EACH = [*zip(KINDS, ("comfyui", "kohya", "peft", "comfyui", "peft", "kohya"), strict=True)]


@pytest.mark.parametrize(("kind", "format"), some(STARTS, *EACH))
def test_a_run_starts_with_them(adapter, tmp_path, kind, format):
    made = adapter("sdxl", kind)
    own = [flag for flag in KINDS[kind] if "pattern" in flag]
    found = started(made, made.export(tmp_path / "style", format=format), CONVOLUTIONS, *own)
    assert found.subject.family.lora.kind == made.subject.family.lora.kind
    torch.testing.assert_close(found.predict(found.model), made.predict(made.model), atol=1e-4, rtol=1e-4)


LAYOUTS = {
    "LyCORIS": lambda layer: f"lycoris_{layer.replace('.', '_')}",
    "kohya's tools": kohya_name,
    "OneTrainer": lambda layer: f"lora_transformer_{layer.replace('.', '_')}",
    "ai-toolkit": lambda layer: f"diffusion_model.{layer}",
}
"""How trainers name the layers of a model that they have from diffusers; the parts of a layer are named as by LyCORIS."""


def renamed(made, folder, name):
    """The file of kohya's format with other names of layers; an alpha beside two full matrices means nothing."""
    file, found = tensors(made.export(folder, format="kohya")), {}
    for layer in expected(made):
        parts = {key.removeprefix(f"{kohya_name(layer)}."): each for key, each in file.items()}
        parts = {part: each for part, each in parts.items() if not part.startswith("lora_unet_")}
        if "alpha" not in parts:
            parts["alpha"] = torch.tensor(9999999999.0)
        found |= {f"{name(layer)}.{part}": each for part, each in parts.items()}
    return found


@pytest.mark.parametrize("kind", ["dora", "lokr", "lokr full", "loha"])
@pytest.mark.parametrize("tool", LAYOUTS)
def test_the_kinds_are_read_under_the_names_of_other_trainers(adapter, tmp_path, tool, kind):
    made, path = adapter("z_image", kind), tmp_path / "other.safetensors"
    save_file(renamed(made, tmp_path / "style", LAYOUTS[tool]), path)
    found = started(made, path, *(flag for flag in KINDS[kind] if "pattern" in flag))
    assert found.subject.family.lora.kind == made.subject.family.lora.kind
    torch.testing.assert_close(found.predict(found.model), made.predict(made.model), atol=1e-4, rtol=1e-4)
    assert readers(AdapterHeader(path), "z_image")["ComfyUI"].startswith("reads it") == (tool == "ai-toolkit")


def test_lengths_of_columns_are_not_taken_for_those_of_rows(adapter, tmp_path):
    """Of a layer with as many inputs as outputs, where the number of them does not tell."""
    made, path = adapter("z_image", "dora"), tmp_path / "columns.safetensors"
    file = renamed(made, tmp_path / "style", kohya_name)
    square = next(layer for layer, weight in expected(made).items() if weight.shape[0] == weight.shape[1])
    file[f"{kohya_name(square)}.dora_scale"] = file[f"{kohya_name(square)}.dora_scale"].T.contiguous()
    save_file(file, path)
    with pytest.raises(UserError, match="a length for each input"):
        started(made, path, "--lora_rank_pattern=to_k=2")


def test_a_dora_starts_as_the_lora_in_a_file(adapter, tmp_path):
    made = adapter("sdxl", "rslora")
    found = started(made, made.export(tmp_path / "style"), CONVOLUTIONS, "--lora_kind=dora")
    torch.testing.assert_close(found.predict(found.model), made.predict(made.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--lora_kind=loha", "is 'loha', and kind in init_lora says 'lokr'"),
        ("--lokr_factor=4", "is '4', and factor in init_lora says 2"),
    ],
)
def test_an_option_that_says_otherwise_than_the_file_is_refused(adapter, tmp_path, flag, reason):
    made = adapter("sdxl", "lokr")
    with pytest.raises(ConfigError, match=reason):
        started(made, made.export(tmp_path / "style", format="peft"), CONVOLUTIONS, flag)


def test_a_file_whose_layers_have_other_ranks_is_refused_with_what_it_holds(adapter, tmp_path):
    made = adapter("sdxl", "lokr")
    with pytest.raises(UserError, match=r"attn1\.to_k has in .* lokr_w2_a \[\d+, 2\].*and in the run lokr_w2_a \[\d+, 4\]"):
        started(made, made.export(tmp_path / "style", format="peft"), CONVOLUTIONS)


@pytest.mark.parametrize(
    ("name", "kind", "format", "reason"),
    [
        ("flux", "lokr", "diffusers", "diffusers loads no LoKr into the pipeline of flux"),
        ("flux2", "loha", "diffusers", "diffusers loads no LoHa"),
        ("flux", "lokr", "kohya", "are one layer, double_blocks.0.img_attn.qkv, and the LoKr of several layers is none"),
    ],
)
def test_what_a_format_cannot_carry_is_refused_with_a_way_out(adapter, tmp_path, name, kind, format, reason):
    with pytest.raises(UserError, match=reason) as refused:
        adapter(name, kind).export(tmp_path / "style", format=format)
    assert "--merge" in refused.value.fix
    assert "--format=comfyui" in refused.value.fix


def test_layers_with_factors_of_their_own_are_written_for_comfyui_alone(tmp_path):
    flags = ("--lora_kind=lokr", "--lokr_factor=2", "--lokr_factor_pattern=to_k=1")
    made = make_adapter(tmp_path, "flux2", *flags)
    with pytest.raises(UserError, match="divided by several factors"):
        made.export(tmp_path / "style")
    file = tensors(made.export(tmp_path / "other", format="comfyui"))
    for layer, weight in expected(made).items():
        found = read(bases(made)[layer], file, f"transformer.{layer}", comfyui=True)
        torch.testing.assert_close(found, weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: {"a.lokr_w1": torch.ones(2, 2)}, "has of a only lokr_w1"),
        (
            lambda file: {f"{next(iter(file)).partition('.lokr_')[0]}.dora_scale": torch.ones(4, 1)},
            "dora_scale beside a product",
        ),
        (lambda file: {"lora_unet_x.oft_blocks": torch.ones(1)}, "is an OFT, which is not supported"),
        (lambda file: {"lora_unet_x.lokr_t2": torch.ones(1)}, "a LoKr with a Tucker decomposition"),
        (
            lambda file: {f"a.lora_{each}.weight": torch.ones(2, 2) for each in "AB"},
            "has layers of LoKr and LoRA",
        ),
    ],
)
def test_other_files_are_refused(adapter, tmp_path, change, reason):
    file = load_file(next(adapter("flux2", "lokr").export(tmp_path / "style").glob("*.safetensors")))
    save_file(file | change(file), tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=reason):
        AdapterHeader(tmp_path / "other.safetensors")


def test_an_assistant_is_a_lora(adapter, tmp_path):
    made = adapter("flux", "lokr")
    (file,) = made.export(tmp_path / "style", format="comfyui").glob("*.safetensors")
    with pytest.raises(UserError, match="is a LoKr, and an assistant is a LoRA"):
        family("flux", made.base, "--model_type=lora", f"--assistant_lora={file}").build_model()


@pytest.mark.parametrize("factor", [-1, 1, 2, 4, 6, 16, 25])
def test_sizes_are_divided_as_peft_does(factor):
    from peft.tuners.lokr.layer import factorization

    for size in (*range(1, 70), 127, 250, 640, 1024, 1152, 3072):
        assert factorised(size, factor) == factorization(size, factor)
