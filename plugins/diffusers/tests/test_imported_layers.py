"""An imported LoRA adapts what its trainer adapts: at published sizes, by the rule of each trainer over diffusers' layers."""

import json
import re
import tomllib
from functools import cache

import diffusers
import pytest
import torch
from published import PUBLISHED, UNETS
from torch import nn

from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti_diffusers.lora.adapter import Lora, adapted_layers, adapter_shapes, attach
from smalti_diffusers.lora.formats import original_layers
from smalti_migrate.commented_toml import as_toml
from smalti_migrate.importing import import_files
from support.whole import some

RANK = 16
KOHYA = {
    "sd1x": (192, 6_782_976, 192, 6_782_976),
    "sd2x": (192, 6_914_048, 192, 6_914_048),
    "sdxl": (722, 42_557_440, 722, 42_557_440),
    "flux": (494, 85_917_696, 304, 76_578_816),
    "chroma": (418, 65_372_160, 228, 56_033_280),
    "sd3": (333, 29_097_984, 237, 26_738_688),
    "lumina2": (240, 28_640_256, 180, 26_428_416),
    "anima": (280, 22_937_600, 280, 22_937_600),
}
"""Layers and parameters of an adapter, here and there. But for U-Nets, query, key and value are one layer there."""
LAST = "transformer_blocks.23.norm1_context.linear"
"""A layer of SD 3 whose rows are in another order in the original model, so that `original_layers` has none for it."""
KOHYA_BLOCKS = {
    **dict.fromkeys(UNETS, ("Transformer2DModel",)),
    "chroma": ("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    "flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    "sd3": ("JointTransformerBlock",),
    "lumina2": ("Lumina2TransformerBlock", "LuminaLayerNormContinuous"),
    "anima": ("Attention", "FeedForward"),
}
"""The classes of diffusers in which sd-scripts adapts every linear layer. Of Lumina 2 it has the last layer too."""
AI_TOOLKIT = {
    "sd1x": (192, 6_782_976),
    "sd2x": (192, 6_914_048),
    "chroma": (418, 65_372_160),
    "ernie": (252, 47_185_920),
    "sdxl": (722, 42_557_440),
    "flux": (494, 85_917_696),
    "flux2": (100, 24_084_480),
    "sd3": (333, 29_097_984),
    "lumina2": (238, 28_549_120),
    "pixart": (280, 13_418_496),
    "auraflow": (326, 51_597_824),
    "qwen_image": (840, 147_456_000),
    "z_image": (240, 42_516_480),
    "anima": (448, 34_635_776),
}
AI_TOOLKIT_BLOCKS = {"lumina2": ("layers.", "noise_refiner.", "context_refiner."), "auraflow": ("",)}
AI_TOOLKIT_BLOCKS |= dict.fromkeys(UNETS, ("attentions",)) | dict.fromkeys(("ernie", "z_image"), ("layers",))
"""Parts of the names of layers; `transformer_blocks` of all others."""
ARCHITECTURES = {"z_image": "zimage", "sd1x": "sd1", "sd2x": "sd2", "ernie": "ernie_image"}
ONETRAINER = {
    "sd1x": ("STABLE_DIFFUSION_15", 282),
    "sd2x": ("STABLE_DIFFUSION_21_BASE", 282),
    "sdxl": ("STABLE_DIFFUSION_XL_10_BASE", 794),
    "sd3": ("STABLE_DIFFUSION_35", 341),
    "flux": ("FLUX_DEV_1", 504),
    "flux2": ("FLUX_2", 109),
    "chroma": ("CHROMA_1", 433),
    "ernie": ("ERNIE", 259),
    "pixart": ("PIXART_SIGMA", 287),
    "sana": ("SANA", 207),
    "qwen_image": ("QWEN", 846),
    "z_image": ("Z_IMAGE", 276),
    "anima": ("ANIMA", 454),
    "krea2": ("KREA_2", 264),
    "ideogram": ("IDEOGRAM_4", 279),
}


@pytest.fixture(scope="module")
def model():
    """model(family): of published size, on the meta device."""
    made = {}

    def give(family):
        if family not in made:
            name, config = PUBLISHED[family]
            with torch.device("meta"):
                made[family] = getattr(diffusers, name).from_config(config)
        return made[family]

    yield give
    layers.cache_clear()


@pytest.fixture(scope="module")
def schema():
    return schema_of(load_plugins())


@pytest.fixture
def imported(schema, tmp_path):
    """imported(content) -> the values of the file that is written, and what is left by the end of its place."""

    def give(content):
        path = tmp_path / ("run.sh" if isinstance(content, str) else "config.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        result = import_files([path], schema)
        left = {each.place.rpartition(" ")[2]: each for each in result.left}
        return tomllib.loads(as_toml(result, schema)), left

    return give


def kohya(family, **arguments):
    name = {"lumina2": "lumina", "chroma": "flux"}.get(family, family)
    module = "networks.lora" if family in UNETS else f"networks.lora_{name}"
    script = "train_network.py" if family in ("sd1x", "sd2x") else f"{name}_train_network.py"
    script += {"sd2x": " --v2", "chroma": " --model_type=chroma --apply_t5_attn_mask"}.get(family, "")
    words = " ".join(f"{key}={value}" for key, value in arguments.items())
    return (
        f"accelerate launch {script} --network_module={module} --network_dim={RANK} --network_alpha=1 "
        f"--network_train_unet_only --model_prediction_type=raw --network_args {words}"
    )


def ai_toolkit(family, **network):
    arch = ARCHITECTURES.get(family, family)
    process = {"type": "sd_trainer", "network": {"type": "lora", "linear": RANK, **network}, "model": {"arch": arch}}
    return {"job": "extension", "config": {"name": "x", "process": [process]}}


def onetrainer(family, **keys):
    return {"model_type": ONETRAINER[family][0], "training_method": "LORA", "lora_rank": RANK, "workspace_dir": "x", **keys}


@cache
def layers(model):
    """Linear layers and convolutions. Asked for by every name of a layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}


def is_linear(module):
    """A convolution of 1x1 is taken as linear by sd-scripts and ai-toolkit."""
    return getattr(module, "kernel_size", (1, 1)) == (1, 1)


def linear(model, *classes):
    """Names of linear layers in modules of these classes."""
    roots = tuple(f"{name}." for name, module in model.named_modules() if type(module).__name__ in classes)
    return {name for name, module in layers(model).items() if is_linear(module) and name.startswith(roots)}


def adapted(values, model):
    return set(adapted_layers(model, values["lora_targets"]))


def parameters(inputs, outputs):
    return RANK * (inputs + outputs)


def counted(model, names):
    """Parameters of lora_A, which has the kernel of a convolution, and of lora_B."""
    weights = [layers(model)[name].weight for name in names]
    return sum(parameters(weight[0].numel(), len(weight)) for weight in weights)


def fused(model, names):
    """Those of the layers of the original model in which these layers of diffusers are."""
    return {key: each for key, each in original_layers(model, dict(model.config)).items() if names.intersection(each)}


@pytest.mark.parametrize("family", KOHYA)
def test_kohya_adapts_all_linear_layers_of_blocks(imported, model, family):
    values, left = imported(kohya(family))
    net = model(family)
    found = adapted(values, net)
    assert found == linear(net, *KOHYA_BLOCKS[family])
    theirs = fused(net, found)
    theirs |= {"joint_blocks.23.context_block.adaLN_modulation.1": (LAST,)} if family == "sd3" else {}
    assert {name for each in theirs.values() for name in each} == found
    sizes = [[layers(net)[name].weight.shape for name in each] for each in theirs.values()]
    there = sum(parameters(shapes[0][1], sum(shape[0] for shape in shapes)) for shapes in sizes)
    assert (len(found), counted(net, found), len(theirs), there) == KOHYA[family]
    assert left.keys() == {"datasets"}


CHOICES = {
    "flux double": ("flux", {"train_blocks": "double"}, "double_blocks"),
    "flux single": ("flux", {"train_blocks": "single", "split_qkv": "True"}, "single_blocks"),
    "flux numbers": (
        "flux",
        {"train_double_block_indices": "none", "train_single_block_indices": "1-2,10"},
        "single_blocks_(1|2|10)_",
    ),
    "flux kinds": (
        "flux",
        {"img_attn_dim": 0, "txt_mlp_dim": 0, "single_mod_dim": 0, "txt_mod_dim": RANK},
        "double_blocks_[0-9]+_(txt_attn|img_mlp|img_mod|txt_mod)|single_blocks_[0-9]+_linear",
    ),
    "flux kinds of some blocks": (
        "flux",
        {"train_double_block_indices": "0,18", "img_mod_dim": 0, "txt_mod_dim": 0, "single_dim": 0},
        "double_blocks_(0|18)_(img|txt)_(attn|mlp)|single_blocks_[0-9]+_modulation",
    ),
    "chroma": (
        "chroma",
        {"in_dims": "[16,0,0,0,16]", "single_dim": 0, "img_mlp_dim": 0},
        "double_blocks_[0-9]+_(txt|img_attn)|unet_(img|txt)_in",
    ),
    "sd1x convolutions": (
        "sd1x",
        {"conv_dim": RANK, "conv_alpha": 1},
        "transformer_blocks|proj_(in|out)|in_layers|out_layers|emb_layers|skip_connection|_op$|_conv$",
    ),
    "flux inputs": ("flux", {"in_dims": "[16,0,16,0,16]"}, "_blocks_|unet_(img|vector|txt)_in"),
    "sd3 numbers": ("sd3", {"train_block_indices": "0-3"}, "joint_blocks_[0-3]_"),
    "sd3 kinds": (
        "sd3",
        {"context_attn_dim": 0, "x_mod_dim": 0},
        "context_block_(mlp|adaLN)|x_block_(attn|mlp)",
    ),
    "sd3 embedders": ("sd3", {"emb_dims": "16,16,16,16,0,16"}, "joint_blocks|unet_(context|t|x|y)_embedder|final_layer_linear"),
    "lumina2 transformer": ("lumina2", {"train_blocks": "transformer"}, "unet_layers_"),
    "lumina2 refiners": ("lumina2", {"train_blocks": "refiners"}, "_refiner_"),
    "lumina2 embedders": (
        "lumina2",
        {"embedder_dims": "16,0,16"},
        "unet_layers_|_refiner_|final_layer|unet_(x|cap)_embedder",
    ),
    "sdxl convolutions": (
        "sdxl",
        {"conv_dim": RANK, "conv_alpha": 1},
        "transformer_blocks|proj_(in|out)|in_layers|out_layers|emb_layers|skip_connection|_op$|_conv$",
    ),
}
"""Arguments of networks, and the names of the layers that they choose there, which are those of the original models."""


@pytest.mark.parametrize("choice", CHOICES)
def test_arguments_of_kohyas_networks_choose_layers(imported, model, choice):
    family, arguments, there = CHOICES[choice]
    values, left = imported(kohya(family, **arguments))
    net = model(family)
    originals = original_layers(net, dict(net.config))
    # The rows of these layers are in another order there, so that their names are not among those.
    reordered = {"final_layer": ("norm_out.linear",), "joint_blocks.23.context_block": (LAST,)} if family == "sd3" else {}
    originals |= {f"{block}.adaLN_modulation.1": names for block, names in reordered.items()}
    wanted = {
        name
        for original, names in originals.items()
        for name in names
        if re.search(there, "lora_unet_" + original.replace(".", "_")) and name in layers(net)
    }
    assert adapted(values, net) == wanted
    assert left.keys() == {"datasets"}


def test_what_kohya_adapts_and_smalti_does_not_is_listed_with_its_number(imported, model):
    text = kohya("sdxl", conv_dim=8, conv_alpha=4, rank_dropout=0.1, block_dims="1,2").replace("--network_train_unet_only", "")
    values, left = imported(text)
    net = model("sdxl")
    assert left.keys() == {"datasets", "conv_dim", "rank_dropout", "block_dims"}
    assert values["train_text_encoder"] is True
    assert "722 of 788 layers" in left["conv_dim"].why
    assert values["lora_targets"][-2:] == ["fc1", "fc2"]
    assert len(adapted(values | {"lora_targets": values["lora_targets"][:-2]}, net)) == 722
    assert len(adapted(imported(kohya("sdxl", conv_dim=RANK, conv_alpha=1))[0], net)) == 788
    assert {"in_dims", "img_attn_dim"} <= imported(kohya("flux", in_dims="4,0,0,0,0", img_attn_dim=4))[1].keys()


@pytest.mark.parametrize("family", AI_TOOLKIT)
def test_ai_toolkit_adapts_all_linear_layers_of_blocks(imported, model, family):
    values, left = imported(ai_toolkit(family, linear_alpha=8))
    net = model(family)
    parts = AI_TOOLKIT_BLOCKS.get(family, ("transformer_blocks",))
    every = {name for name, module in layers(net).items() if is_linear(module)}
    wanted = {name for name in every if any(part in name for part in parts)}
    assert adapted(values, net) == wanted
    assert (len(wanted), counted(net, wanted)) == AI_TOOLKIT[family]
    assert (values["lora_rank"], values["lora_alpha"]) == (RANK, 8 if family in (*UNETS, "pixart", "auraflow") else RANK)
    assert left.keys() == {"datasets"}


WORDS = {
    "flux": {
        "only_if_contains": ["transformer.single_transformer_blocks.7.proj_out", "transformer_blocks$$3$$attn"],
        "ignore_if_contains": ["add_k_proj", "single_transformer_blocks.33"],
    },
    "z_image": {"ignore_if_contains": ["attention.to_out"]},
    "sdxl": {"only_if_contains": ["down_blocks_2_attentions", "lora_unet.mid_block"], "ignore_if_contains": ["ff.net"]},
}


@pytest.mark.parametrize("family", WORDS)
def test_ai_toolkit_chooses_layers_by_parts_of_their_names(imported, model, family):
    values, _ = imported(ai_toolkit(family, network_kwargs=WORDS[family]))
    net = model(family)
    prefix, joint = ("lora_unet", "_") if family == "sdxl" else ("transformer", "$$")
    wanted = set()
    for name in adapted(imported(ai_toolkit(family))[0], net):
        full = f"{prefix}.{name}"
        ignored = any(word in full for word in WORDS[family]["ignore_if_contains"])
        only = WORDS[family].get("only_if_contains")
        if not ignored and (only is None or any(word in full or word in full.replace(".", joint) for word in only)):
            wanted.add(name)
    assert wanted
    assert adapted(values, net) == wanted


def test_ai_toolkit_adapts_convolutions_and_layers_outside_of_blocks_on_demand(imported, model):
    sdxl, sd3 = model("sdxl"), model("sd3")
    convolutions = {"conv": 8, "conv_alpha": 4}
    values, left = imported(ai_toolkit("sdxl", linear_alpha=4, **convolutions))
    assert (len(adapted(values, sdxl)), "722 of 788" in left["network.conv"].why) == (722, True)
    values, left = imported(ai_toolkit("sdxl", linear_alpha=4, **convolutions, rank=8))
    assert (len(adapted(values, sdxl)), left.keys()) == (788, {"datasets"})
    values, left = imported(ai_toolkit("sd3", **convolutions, transformer_only=False))
    assert adapted(values, sd3) == {name for name, module in layers(sd3).items() if type(module) is nn.Linear}
    values, left = imported(ai_toolkit("flux2", network_kwargs={"only_if_contains": ["double_blocks"]}))
    assert left["network.network_kwargs.only_if_contains"].fix == "name the layers in lora_targets"
    assert imported(ai_toolkit("flux2"))[0]["lora_targets"] == values["lora_targets"]


@pytest.mark.parametrize("family", ONETRAINER)
def test_onetrainer_adapts_all_linear_layers_and_convolutions(imported, model, family):
    values, left = imported(onetrainer(family, text_encoder={"train": False}))
    net = model(family)
    found = adapted(values, net)
    lost = {name for name, module in layers(net).items() if isinstance(module, nn.Conv2d) and module.groups > 1}
    assert (found | lost, len(found)) == (set(layers(net)), ONETRAINER[family][1])
    assert ("layer_filter" in left, bool(lost)) == (family == "sana", family == "sana")


FILTERS = {
    "parts of names": ("qwen_image", {"layer_filter": "attn, img_mlp,txt_mlp"}, "attn|img_mlp|txt_mlp", 720),
    "an expression": (
        "z_image",
        {
            "layer_filter": "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*",
            "layer_filter_preset": "attn-mlp",
            "layer_filter_regex": True,
        },
        r"^layers\.[0-9]+\.(attention|feed_forward)\.",
        210,
    ),
    "a preset of Anima": ("anima", {"layer_filter_preset": "attn-mlp"}, "attn1|attn2|ff", 280),
    "a preset alone": ("sdxl", {"layer_filter_preset": "attn-mlp"}, "attentions", 722),
    "keys of older files": ("flux", {"lora_layers": "attn,ff.net", "lora_layer_preset": "attn-mlp"}, r"attn|ff\.net", 304),
}


@pytest.mark.parametrize("name", FILTERS)
def test_onetrainer_filters_layers_by_their_names(imported, model, name):
    family, keys, pattern, count = FILTERS[name]
    values, left = imported(onetrainer(family, **keys, text_encoder={"train": False}, text_encoder_2={"train": False}))
    net = model(family)
    wanted = {layer for layer in layers(net) if re.search(pattern, layer)}
    assert (adapted(values, net), len(wanted)) == (wanted, count)
    assert "layer_filter" not in left


def test_a_filter_that_cannot_be_converted_is_listed(imported):
    values, left = imported(onetrainer("flux", layer_filter="attn(", layer_filter_regex=True))
    assert ("lora_targets" in values, left["layer_filter"].why) == (False, "it is not a regular expression")
    full = onetrainer("flux", layer_filter="attn") | {"training_method": "FINE_TUNE"}
    values, left = imported(full)
    assert ("lora_targets" in values, left["layer_filter"].why) == (False, "all layers are trained, without an adapter")


COUNTED = [("sdxl", kohya), ("sdxl", onetrainer), ("qwen_image", ai_toolkit)]


@pytest.mark.parametrize(("family", "content"), some(COUNTED, COUNTED[0], COUNTED[2]))
def test_an_adapter_has_the_parameters_that_were_counted(imported, model, family, content):
    """Also that of convolutions: 1x1, of two strides, at both ends of the U-Net."""
    values, _ = imported(content(family))
    names = adapted(values, model(family))
    name, config = PUBLISHED[family]
    with torch.device("meta"):
        net = getattr(diffusers, name).from_config(config)
    lora = Lora(rank=RANK, alpha=1, dropout=0, targets=tuple(values["lora_targets"]))
    shapes = adapter_shapes(attach(net, lora, torch.float32))
    assert {key.partition(".lora_")[0] for key in shapes} == names
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == counted(model(family), names)
