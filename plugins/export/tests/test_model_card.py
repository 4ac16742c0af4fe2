"""The model card of an export: what it says, and what it keeps to itself."""

import pytest
import yaml

from smalti.checkpoint import Usage
from smalti.config import restore
from smalti.plugins import load_plugins, schema_of
from smalti.rundir import RunDirectory
from smalti.rundir.events import EventWriter
from smalti_export.model_card import MARK, model_card, sampled_images


@pytest.fixture
def card():
    schema = schema_of(load_plugins())

    def card(base_model="ann/base", images=(), **options):
        config = restore(schema, {"output_dir": "/home/ann/runs/cat", **options}, {})
        return model_card(
            "cat",
            config,
            family="sdxl",
            step=7,
            averaged=True,
            metadata={"base_model": base_model, "base_model_relation": "adapter", "tags": ["lora"]},
            images=images,
            usages=[
                Usage(tool="diffusers", text='pipeline.load_lora_weights("ann/cat")'),
                Usage(tool="ComfyUI", text="export again", needs_run=True),
            ],
        )

    return card


def head(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_head_is_what_the_hub_reads(card):
    text = card(instance_prompt="zwx cat: a", images=[("zwx\ncat [1]", "images/0.png")])
    assert head(text) == {
        "base_model": "ann/base",
        "base_model_relation": "adapter",
        "tags": ["lora", "smalti"],
        "instance_prompt": "zwx cat: a",
        "widget": [{"text": "zwx\ncat [1]", "output": {"url": "images/0.png"}}],
    }
    assert MARK in text
    assert "![zwx cat 1](images/0.png)" in text
    assert "trained from ann/base with smalti" in text
    assert "Trained with the prompt `zwx cat: a`" in text
    assert "ComfyUI" not in text


def test_settings_and_how_to_load_are_there_and_no_folder_of_the_machine(card):
    text = card(base_model="/home/ann/models/base", learning_rate=3e-4, resolution=1024.0)
    assert "| `resolution` | 1024 |" in text
    assert "| `learning_rate` | 0.0003 |" in text
    assert 'pipeline.load_lora_weights("ann/cat")' in text
    assert "The EMA weights of step 7 of a model of the family sdxl" in text
    assert "/home" not in text
    assert "base_model" not in head(text)
    assert "base_model_relation" not in head(text)
    assert "family sdxl, trained with smalti" in text


def test_images_are_those_of_the_last_validation_up_to_the_step_that_are_still_there(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    for step in (1, 2, 3):
        (tmp_path / f"{step}.png").write_bytes(b"image")
        images = [{"prompt": "cat", "seed": 0, "path": f"{step}.png"}, {"prompt": "dog", "seed": 0, "path": "gone.png"}]
        writer.append("sample", step=step, images=images)
    writer.close()
    assert sampled_images(RunDirectory(tmp_path), 2) == [("cat", tmp_path / "2.png")]
    (tmp_path / "2.png").unlink()
    assert sampled_images(RunDirectory(tmp_path), 2) == [("cat", tmp_path / "1.png")]
    assert sampled_images(RunDirectory(tmp_path), 0) == []
