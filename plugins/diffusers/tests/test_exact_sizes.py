"""Models of published shape, built from their configurations alone: how many parameters they have, and what they compute."""

import json
import resource
import shutil

import formulas
import pytest
import torch
from compared import compares
from published import published

from smalti.models import dry_run
from smalti_diffusers.families.anima import Anima
from smalti_diffusers.families.auraflow import AuraFlow
from smalti_diffusers.families.bria import Bria
from smalti_diffusers.families.chroma import Chroma
from smalti_diffusers.families.cosmos import Cosmos
from smalti_diffusers.families.ernie import Ernie
from smalti_diffusers.families.flux import Flux
from smalti_diffusers.families.flux2 import Flux2
from smalti_diffusers.families.hidream import HiDream
from smalti_diffusers.families.ideogram import Ideogram
from smalti_diffusers.families.krea2 import Krea2
from smalti_diffusers.families.longcat_image import LongCatImage
from smalti_diffusers.families.lumina2 import Lumina2
from smalti_diffusers.families.ovis_image import OvisImage
from smalti_diffusers.families.pixart import PixArt
from smalti_diffusers.families.qwen_image import QwenImage
from smalti_diffusers.families.qwen_image21 import QwenImage21
from smalti_diffusers.families.sana import Sana
from smalti_diffusers.families.sd1x import StableDiffusion1
from smalti_diffusers.families.sd2x import StableDiffusion2
from smalti_diffusers.families.sd3 import StableDiffusion3
from smalti_diffusers.families.sdxl import Sdxl
from smalti_diffusers.families.unet import UNetFamily
from smalti_diffusers.families.z_image import ZImage
from smalti_diffusers.lora.adapter import Lora
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from support.whole import some

MODELS = {
    "flux dev": (Flux, "dev"),
    "chroma": (Chroma, "hd"),
    "bria": (Bria, "3.2"),
    "ernie": (Ernie, "base"),
    "flux2 klein 4b": (Flux2, "klein-base-4b"),
    "flux2 klein 9b": (Flux2, "klein-base-9b"),
    "flux2 dev": (Flux2, "dev"),
    "sd3 medium": (StableDiffusion3, "medium"),
    "sd3.5 medium": (StableDiffusion3, "3.5-medium"),
    "sd3.5 large": (StableDiffusion3, "3.5-large"),
    "pixart sigma": (PixArt, "sigma-1024"),
    "sana 1600m": (Sana, "1600m-1024"),
    "sana 600m": (Sana, "600m-1024"),
    "auraflow 0.1": (AuraFlow, "0.1"),
    "hidream": (HiDream, "full"),
    "ideogram": (Ideogram, "v4"),
    "krea2": (Krea2, "raw"),
    "longcat image": (LongCatImage, "final"),
    "lumina2": (Lumina2, "2.0"),
    "ovis image": (OvisImage, "7b"),
    "qwen image": (QwenImage, "image"),
    "qwen image 2.1": (QwenImage21, "2.1"),
    "z image": (ZImage, "turbo"),
    "anima": (Anima, "base-1.0"),
    "cosmos 2b": (Cosmos, "2b"),
    "cosmos 14b": (Cosmos, "14b"),
    "sd 1.5": (StableDiffusion1, "1.5"),
    "sd 2.1": (StableDiffusion2, "2.1"),
    "sdxl": (Sdxl, "base-1.0"),
}
KEPT = (
    "flux dev",
    "chroma",
    "bria",
    "ernie",
    "flux2 dev",
    "sd3.5 medium",
    "pixart sigma",
    "sana 600m",
    "auraflow 0.1",
    "hidream",
    "ideogram",
    "krea2",
    "longcat image",
    "lumina2",
    "ovis image",
    "qwen image",
    "qwen image 2.1",
    "z image",
    "anima",
    "cosmos 14b",
)
"""One of each family."""
PARAMETERS = {
    "flux dev": 11_901_408_320,
    "chroma": 8_899_983_424,
    "bria": 3_785_669_392,
    "ernie": 8_033_490_048,
    "flux2 klein 4b": 3_875_544_576,
    "flux2 klein 9b": 9_078_581_248,
    "flux2 dev": 32_223_281_152,
    "sd3 medium": 2_028_328_000,
    "sd3.5 medium": 2_243_171_520,
    "sd3.5 large": 8_056_627_520,
    "pixart sigma": 610_856_096,
    "sana 1600m": 1_604_462_752,
    "sana 600m": 591_747_872,
    "auraflow 0.1": 6_842_876_928,
    "hidream": 17_105_733_184,
    "ideogram": 9_279_288_448,
    "krea2": 12_820_073_036,
    "longcat image": 6_270_668_864,
    "lumina2": 2_609_769_152,
    "ovis image": 7_370_449_728,
    "qwen image": 20_430_401_088,
    "qwen image 2.1": 7_115_124_736,
    "z image": 6_154_908_736,
    "anima": 1_956_405_248,
    "cosmos 2b": 1_956_405_248,
    "cosmos 14b": 14_265_265_152,
    "sd 1.5": 859_520_964,
    "sd 2.1": 865_910_724,
    "sdxl": 2_567_463_684,
}
FEW = {"num_layers": 2, "num_single_layers": 3, "num_mmdit_layers": 1, "num_single_dit_layers": 3, "n_layers": 2}
FEW |= {"llama_layers": [0, 1, 2, 31, 31]}
"""Layers, where every one costs what the others do: all of them take a second or two to count."""


@pytest.fixture
def build(tmp_path):
    def give(name, **changes):
        family, flavour = MODELS[name]
        config, folder = published(family.name, flavour, family.part)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        changed = config | {key: value for key, value in changes.items() if key in config}
        (tmp_path / family.part / "config.json").write_text(json.dumps(changed))
        with dry_run():  # the tokenizer of one of them needs a package more
            return family(Components(tmp_path), DiffusersOptions())

    return give


@compares("parameters", {name: family.name for name, (family, _) in MODELS.items()})
@pytest.mark.parametrize("name", some(MODELS, *KEPT, "sdxl"))
def test_a_published_shape_has_the_published_number_of_parameters_and_takes_no_memory(build, name):
    family = build(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in family.build_model().parameters()) == PARAMETERS[name]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize("name", some([name for name in MODELS if name != "sdxl"], *KEPT))
def test_what_a_forward_pass_costs_is_counted_to_the_last_operation(build, name):
    family = build(name, **FEW)
    assert family.flops_per_sample(1024, 768) == formula(family, 1024, 768)


@pytest.mark.parametrize(("name", "teraflops"), some([("sdxl", 6.76), ("flux dev", 74.38)], ("sdxl", 6.76)))
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
    tokens = height * width * family.vae_scale**2 // family.alignment**2
    picture = (height, width) if isinstance(family, UNetFamily) else (tokens,)
    with torch.device("meta"):
        text = family.example_conditioning(width, height)["tokens"].shape[1]
        return getattr(formulas, family.name)(family.build_base().config, *picture, text)
