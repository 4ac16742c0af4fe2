"""What is fetched from the hub: only what a run reads, from a server that speaks the hub's protocol."""

import shutil

import pytest
import tiny
import torch
from diffusers import StableDiffusionXLPipeline
from hub_server import hub
from single_files import UNET, single_file
from test_single_file import different, family_from

from smalti import UserError
from smalti.models import dry_run
from smalti_diffusers.sources import location
from smalti_diffusers.sources.components import Components


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    root = tmp_path_factory.mktemp("repositories")
    base = tiny.sdxl(root / "base")
    pipeline = StableDiffusionXLPipeline.from_pretrained(base, dtype=torch.float16)
    pipeline.save_pretrained(root / "half", variant="fp16", max_shard_size="100KB")
    shutil.copytree(base, root / "both")
    shutil.copytree(root / "half", root / "both", dirs_exist_ok=True)
    (root / "both" / "whole.safetensors").write_bytes(b"a second copy")
    (root / "both" / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    shutil.copytree(base / "unet", root / "unet")
    (root / "files").mkdir()
    single_file(base, root / "files" / "model.safetensors", "sdxl", part="unet", prefix=UNET, vae="first_stage_model.")
    return {f"user/{path.name}": path for path in root.iterdir()}


@pytest.fixture
def sent(repositories, monkeypatch, tmp_path):
    location._small.cache_clear()
    with hub(repositories, monkeypatch, tmp_path / "cache") as files:
        yield files
    location._small.cache_clear()


def weights(sent):
    return {name for name in sent if name.endswith((".safetensors", ".bin"))}


def test_plain_weights_are_fetched_without_variants_pickles_and_second_copies(sent, repositories):
    found = family_from("sdxl", "user/both").components
    assert different(found.weights("unet"), Components(repositories["user/base"]).weights("unet")) == []
    assert len(weights(sent)) == 4
    assert not any("fp16" in name for name in weights(sent))


@pytest.mark.parametrize(("name", "flags"), [("user/half", ()), ("user/both", ("--variant=fp16",))])
def test_a_variant_is_fetched_where_it_is_asked_for_or_the_only_one(sent, name, flags):
    assert family_from("sdxl", name, *flags).components.weights("unet").get("conv_in.bias").dtype == torch.float16
    assert len(weights(sent)) > 8
    assert all("fp16" in name for name in weights(sent))


def test_of_a_base_only_the_weights_that_the_file_does_not_have_are_fetched(sent, repositories):
    file = repositories["user/files"] / "model.safetensors"
    family_from("sdxl", file, "--base_pipeline=user/both")
    assert {name.split("/")[2] for name in weights(sent)} == {"text_encoder", "text_encoder_2"}


@pytest.mark.parametrize(
    "name", ["user/files/model.safetensors", "https://huggingface.co/user/files/blob/main/model.safetensors"]
)
def test_a_single_file_is_fetched_from_a_repository(sent, repositories, name):
    found = family_from("sdxl", name, f"--base_pipeline={repositories['user/base']}").base_weights(0)
    assert different(found, Components(repositories["user/base"]).weights("unet")) == []
    assert sent == ["user/files/model.safetensors"]


def test_a_repository_with_the_unet_alone_is_trained_beside_a_base(sent, repositories):
    found = family_from("sdxl", "user/unet", f"--base_pipeline={repositories['user/base']}").base_weights(0)
    assert different(found, Components(repositories["user/base"]).weights("unet")) == []


def test_a_repository_of_single_files_is_refused_with_the_name_of_one(sent):
    with pytest.raises(UserError, match="user/files is not a pipeline") as caught:
        family_from("sdxl", "user/files")
    assert caught.value.fix.endswith("user/files/model.safetensors")


def test_what_was_fetched_is_used_without_a_connection(sent, repositories, monkeypatch):
    family_from("sdxl", "user/half")
    before = len(sent)
    location._small.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert family_from("sdxl", "user/half").components.weights("unet").get("conv_in.bias").dtype == torch.float16
    assert len(sent) == before


def test_a_dry_run_fetches_no_weights_and_checks_those_that_are_there(sent):
    with dry_run("missing"):
        found = family_from("sdxl", "user/base", "--model_type=lora")
        assert found.components.missing == "user/base"
        assert found.adapter(0)["base"] is None
        assert any("the weights of user/base are not on this machine" in each for each in found.notices)
    assert weights(sent) == set()
    family_from("sdxl", "user/base")
    before = len(weights(sent))
    with dry_run("missing"):
        found = family_from("sdxl", "user/base", "--model_type=lora")
        assert (found.components.missing, found.notices) == ("", ())
        assert found.adapter(0)["base"]
    assert len(weights(sent)) == before > 0
