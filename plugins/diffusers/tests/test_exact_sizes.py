"""Models of published shape, built from their configurations alone: how many parameters they have, and what they compute."""

import json
import resource
from inspect import signature

import diffusers
import formulas
import pytest
import torch
from published import AURAFLOW, FLUX_DEV, KLEIN, LUMINA2, PIXART_SIGMA, QWEN_IMAGE, SANA, SD3, SD35_MEDIUM, SDXL, Z_IMAGE

from smalti_diffusers.families.auraflow import AuraFlow
from smalti_diffusers.families.flux import Flux
from smalti_diffusers.families.flux2 import Flux2
from smalti_diffusers.families.lumina2 import Lumina2
from smalti_diffusers.families.pixart import PixArt
from smalti_diffusers.families.qwen_image import QwenImage
from smalti_diffusers.families.sana import Sana
from smalti_diffusers.families.sd3 import StableDiffusion3
from smalti_diffusers.families.sdxl import Sdxl
from smalti_diffusers.families.z_image import ZImage
from smalti_diffusers.lora.adapter import Lora
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.pipeline import parameter_count
from smalti_diffusers.sources.components import Components

SMALL_SANA = {
    "num_layers": 28,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
MODELS = {
    "flux dev": (
        Flux,
        "FluxTransformer2DModel",
        FLUX_DEV,
    ),
    "flux2 klein 4b": (Flux2, "Flux2Transformer2DModel", KLEIN),
    "flux2 dev": (Flux2, "Flux2Transformer2DModel", {"joint_attention_dim": 15360}),
    "sd3 medium": (StableDiffusion3, "SD3Transformer2DModel", SD3),
    "sd3.5 medium": (
        StableDiffusion3,
        "SD3Transformer2DModel",
        SD35_MEDIUM,
    ),
    "sd3.5 large": (
        StableDiffusion3,
        "SD3Transformer2DModel",
        {**SD3, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"},
    ),
    "pixart sigma": (
        PixArt,
        "Transformer2DModel",  # as its published pipeline says; diffusers makes a PixArtTransformer2DModel of it
        PIXART_SIGMA,
    ),
    "sana 1600m": (Sana, "SanaTransformer2DModel", SANA),
    "sana 600m": (Sana, "SanaTransformer2DModel", {**SANA, **SMALL_SANA}),
    "auraflow 0.1": (AuraFlow, "AuraFlowTransformer2DModel", AURAFLOW),
    "lumina2": (Lumina2, "Lumina2Transformer2DModel", LUMINA2),
    "qwen image": (QwenImage, "QwenImageTransformer2DModel", QWEN_IMAGE),
    "z image": (ZImage, "ZImageTransformer2DModel", Z_IMAGE),
    "sdxl": (Sdxl, "UNet2DConditionModel", SDXL),
}
MADE = {"Transformer2DModel": "PixArtTransformer2DModel"}
VAES = {
    Flux2: {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]},
    Sdxl: {"latent_channels": 4, "block_out_channels": [128, 256, 512, 512]},
    Flux: {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    StableDiffusion3: {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    PixArt: {"latent_channels": 4, "block_out_channels": [128, 256, 512, 512]},
    AuraFlow: {"latent_channels": 4, "block_out_channels": [128, 256, 512, 512]},
    Lumina2: {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    QwenImage: {"z_dim": 16, "temperal_downsample": [False, True, True]},
    Sana: {"latent_channels": 32, "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024]},
    ZImage: {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
}
PIPELINES = {"pixart sigma": "PixArtSigmaPipeline", "flux2 klein 4b": "Flux2KleinPipeline", "flux2 dev": "Flux2Pipeline"}
PARAMETERS = {
    "flux dev": 11_901_408_320,
    "flux2 klein 4b": 3_875_544_576,
    "flux2 dev": 32_223_281_152,
    "sd3 medium": 2_028_328_000,
    "sd3.5 medium": 2_243_171_520,
    "sd3.5 large": 8_056_627_520,
    "pixart sigma": 610_856_096,
    "sana 1600m": 1_604_462_752,
    "sana 600m": 591_747_872,
    "auraflow 0.1": 6_833_439_744,
    "lumina2": 2_609_769_152,
    "qwen image": 20_430_401_088,
    "z image": 6_154_908_736,
    "sdxl": 2_567_463_684,
}
FEW = {"num_layers": 2, "num_single_layers": 3, "num_mmdit_layers": 1, "num_single_dit_layers": 3, "n_layers": 2}
"""Layers, where every one costs what the others do: all of them take a second or two to count."""


@pytest.fixture
def build(tmp_path):
    def give(name, **changes):
        family, model, config = MODELS[name]
        known = signature(getattr(diffusers, MADE.get(model, model))).parameters
        config = config | {key: value for key, value in changes.items() if key in known}
        parts = {family.part: config, "vae": VAES[family], "text_encoder_3": {}}
        for part, values in parts.items():
            (tmp_path / part).mkdir()
            (tmp_path / part / "config.json").write_text(json.dumps(values))
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
        index = {
            "_class_name": getattr(family, "pipeline", PIPELINES.get(name)),
            **{part: ["diffusers", model] for part in parts},
        }
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        return family(Components(tmp_path), DiffusersOptions())

    return give


@pytest.mark.parametrize("name", MODELS)
def test_a_published_shape_has_the_published_number_of_parameters_and_takes_no_memory(build, name):
    family = build(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert parameter_count(family) == PARAMETERS[name]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sdxl"])
def test_what_a_forward_pass_costs_is_counted_to_the_last_operation(build, name):
    family = build(name, **FEW)
    assert family.flops_per_sample(1024, 768) == formula(family, 1024, 768)


@pytest.mark.parametrize(("name", "teraflops"), [("sdxl", 6.76), ("flux dev", 74.38)])
def test_a_picture_of_1024_pixels_takes_the_published_number_of_operations(build, name, teraflops):
    family = build(name)
    counted = family.flops_per_sample(1024, 1024)
    assert (counted, round(counted / 1e12, 2)) == (formula(family, 1024, 1024), teraflops)


def test_an_adapter_in_bf16_changes_nothing_of_what_is_counted(build):
    family = build("sana 600m", **FEW)
    whole = family.flops_per_sample(1024, 1024)
    family.lora, family._base_dtype = Lora(rank=4, alpha=4, dropout=0, targets=family.targets), torch.bfloat16
    assert family.flops_per_sample(1024, 1024) == whole


def formula(family, width, height):
    height, width = height // family.vae_scale, width // family.vae_scale
    picture = (height, width) if isinstance(family, Sdxl) else (height * width * family.vae_scale**2 // family.alignment**2,)
    with torch.device("meta"):
        text = family.example_conditioning(width, height)["tokens"].shape[1]
        return getattr(formulas, family.name)(family.build_base().config, *picture, text)
