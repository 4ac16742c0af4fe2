"""Pipelines whose weights are published in a variant, such as fp16, whole or in shards."""

import json
import shutil

import pytest
import tiny
import torch
from diffusers import StableDiffusionXLPipeline

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.sources.components import Components

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny.sdxl(tmp_path_factory.mktemp("plain") / "base")


@pytest.fixture(scope="module", params=["whole", "sharded"])
def halved(request, plain, tmp_path_factory):
    """The same pipeline with fp16 weights under the names of the variant only."""
    folder = tmp_path_factory.mktemp("variant") / request.param
    pipeline = StableDiffusionXLPipeline.from_pretrained(plain, dtype=torch.float16)
    size = "100KB" if request.param == "sharded" else "10GB"
    pipeline.save_pretrained(folder, variant="fp16", max_shard_size=size)
    assert bool(list(folder.glob("unet/*index.fp16.json"))) == (request.param == "sharded")
    return folder


def family_from(folder, *flags):
    plugins = load_plugins()
    words = ["--model_family=sdxl", f"--pretrained_model_name_or_path={folder}", *flags]
    return find_family(resolve(schema_of(plugins), words, environment={}), plugins)


@pytest.mark.parametrize("flags", [(), ("--variant=fp16",)])
def test_the_only_variant_is_found_by_itself(plain, halved, flags):
    found, expected = family_from(halved, *flags).components, Components(plain)
    for part in PARTS:
        wanted, weights = expected.weights(part), found.weights(part)
        assert [name for name in wanted.names() if not torch.equal(weights.get(name), wanted.get(name).half())] == [], part
        assert next(found.load(part, torch.float32).parameters()).dtype == torch.float32


def test_plain_files_go_first_and_a_variant_has_to_be_asked_for(plain, halved, tmp_path):
    both = shutil.copytree(plain, tmp_path / "both")
    shutil.copytree(halved, both, dirs_exist_ok=True)
    assert family_from(both).components.weights("unet").get("conv_in.bias").dtype == torch.float32
    assert family_from(both, "--variant=fp16").components.weights("unet").get("conv_in.bias").dtype == torch.float16


def test_a_part_without_the_variant_takes_its_plain_files(plain, halved, tmp_path):
    mixed = shutil.copytree(halved, tmp_path / "mixed")
    shutil.rmtree(mixed / "vae")
    shutil.copytree(plain / "vae", mixed / "vae")
    components = family_from(mixed, "--variant=fp16").components
    assert components.weights("vae").get("quant_conv.bias").dtype == torch.float32
    assert components.weights("unet").get("conv_in.bias").dtype == torch.float16


def test_a_variant_that_is_not_there_is_refused_with_those_that_are(halved):
    with pytest.raises(UserError, match="in the variants fp16, and not in the variant 'bf16'") as caught:
        family_from(halved, "--variant=bf16")
    assert caught.value.fix == "--variant=fp16"


def test_missing_weights_are_named_before_anything_is_encoded(plain, tmp_path):
    without = shutil.copytree(plain, tmp_path / "without")
    for path in (without / "text_encoder_2").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=r"no safetensors weights at .*text_encoder_2"):
        family_from(without)


def test_an_export_of_a_variant_has_plain_names_that_every_pipeline_finds(halved, tmp_path):
    class Copies:
        def copy(self, source, name):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / name)

        def write_json(self, name, value):
            (tmp_path / name).write_text(json.dumps(value))

    components = Components(halved)
    for part in components.parts():
        components.export_part(part, Copies())
    shutil.copy(halved / "model_index.json", tmp_path)
    found = StableDiffusionXLPipeline.from_pretrained(tmp_path, dtype=torch.float16)
    expected = StableDiffusionXLPipeline.from_pretrained(halved, variant="fp16", dtype=torch.float16)
    for part in PARTS:
        wanted, weights = (pipeline.components[part].state_dict() for pipeline in (expected, found))
        assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == [], part
