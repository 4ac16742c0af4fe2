"""The tutorial from photos to a LoRA, typed from top to bottom, with tiny models and few steps."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline

from support import pages

PAGE = "tutorials/photos-to-a-lora.md"


def commands() -> list[str]:
    """What a reader types into a shell, except to publish."""
    text = "".join(block.text for block in pages.blocks(PAGE)[1:] if block.kind == "sh").replace("\\\n", "")
    return [line for line in text.splitlines() if not line.startswith("smalti hub")]


def on_a_cpu(command: str) -> str:
    """Two steps, with an image after each."""
    short = re.sub(r"--max_train_steps=\d+", "--max_train_steps=2", command)
    short = re.sub(r"--validation_step_interval=\d+", "--validation_step_interval=1", short)
    return short if find_spec("torchao") else short.replace("--base_model_precision=int8-torchao", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all commands of the page were typed, one after the other."""
    folder = tmp_path_factory.mktemp("photos-to-a-lora")
    pages.photos(folder / "photos")
    bases = {"sdxl": tiny.sdxl(folder / "sdxl"), "flux": tiny.flux(folder / "flux")}
    environment = pages.account(tmp_path_factory.mktemp("account"))
    environment |= {
        "SMALTI_USE_CPU": "true",
        "SMALTI_MIXED_PRECISION": "no",
        "SMALTI_RESOLUTION": "64",
        "SMALTI_VALIDATION_RESOLUTION": "64x64",
        "SMALTI_VALIDATION_NUM_INFERENCE_STEPS": "2",
    }
    for command in commands():
        family = "flux" if "flux" in command else "sdxl"
        words = f"{on_a_cpu(command)} {f'--pretrained_model_name_or_path={bases[family]}' if ' train ' in command else ''}"
        done = subprocess.run(
            words,
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}"
    return folder


def test_every_command_of_the_page_leaves_what_the_page_says(folder):
    assert len(list((folder / "runs" / "zwx" / "samples" / "00000002").glob("*.png"))) >= 1
    assert (folder / "zwx-lora" / "pytorch_lora_weights.safetensors").is_file()
    assert (folder / "zwx-comfyui" / "zwx-comfyui.safetensors").is_file()
    assert (folder / "zwx-flux-comfyui" / "zwx-flux-comfyui.safetensors").is_file()


def test_the_model_card_names_the_trigger_and_shows_the_image(folder):
    card = (folder / "zwx-lora" / "README.md").read_text()
    assert "instance_prompt: a photo of zwx cat" in card
    assert "![a photo of zwx cat in the snow](images/0.png)" in card
    assert (folder / "zwx-lora" / "images" / "0.png").is_file()
    assert "pipeline.load_lora_weights" in card


def test_both_files_of_the_run_change_the_image_of_diffusers_in_the_same_way(folder):
    images = []
    for file in (None, "zwx-lora/pytorch_lora_weights.safetensors", "zwx-comfyui/zwx-comfyui.safetensors"):
        pipeline = DiffusionPipeline.from_pretrained(folder / "sdxl")
        pipeline.set_progress_bar_config(disable=True)
        if file is not None:
            pipeline.load_lora_weights(folder / file)
        image = pipeline(
            "a photo of zwx cat",
            width=64,
            height=64,
            num_inference_steps=2,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        )
        images.append(image.images)
    assert not torch.equal(images[0], images[1])
    torch.testing.assert_close(images[1], images[2], rtol=0, atol=1e-4)
