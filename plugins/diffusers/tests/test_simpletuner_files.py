"""Configurations with the keys of SimpleTuner's examples pass a dry run with notices alone, once paths are put in."""

import json
from pathlib import Path

import pytest
import tiny
from PIL import Image

from support.commands import commands
from support.whole import some

EVERYWHERE = {
    "aspect_bucket_rounding": 2,
    "checkpoint_step_interval": 50,
    "disable_bucket_pruning": True,
    "gradient_checkpointing": True,
    "hub_model_id": "an-example",
    "learning_rate": 1e-4,
    "lora_rank": 4,
    "lora_type": "standard",
    "max_train_steps": 100,
    "model_type": "lora",
    "num_train_epochs": 0,
    "push_checkpoints_to_hub": False,
    "push_to_hub": False,
    "quantize_via": "cpu",
    "report_to": "none",
    "seed": 42,
    "tracker_project_name": "lora-training",
    "tracker_run_name": "a-run",
    "train_batch_size": 1,
    "use_ema": False,
    "vae_batch_size": 1,
    "validation_guidance_rescale": 0.0,
    "validation_num_inference_steps": 4,
    "validation_prompt": "a cat",
    "validation_prompt_library": False,
    "validation_resolution": "128x128",
    "validation_seed": 42,
    "validation_steps": 50,
}
OF_SOME = {
    "base_model_precision": "int8-quanto",
    "controlnet": False,
    "flow_schedule_shift": 3,
    "fuse_qkv_projections": False,
    "grad_clip_method": "value",
    "lora_alpha": 4,
    "lr_scheduler": "constant",
    "num_eval_images": 25,
    "optimizer": "adamw_bf16",
    "validation_disable_unconditional": True,
    "validation_guidance": 4.0,
    "validation_negative_prompt": "blurry",
}
OF_OTHERS = {
    "base_model_precision": "int8-torchao",
    "caption_dropout_probability": 0.0,
    "checkpoints_total_limit": 5,
    "compress_disk_cache": False,
    "disable_benchmark": True,
    "ignore_final_epochs": True,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 10,
    "max_grad_norm": 0.01,
    "minimum_image_size": 0,
    "optimizer": "optimi-lion",
    "quantize_activations": False,
    "resolution": 128,
    "resolution_type": "pixel_area",
    "resume_from_checkpoint": "latest",
    "skip_file_discovery": False,
    "strict_epoch_limit": False,
    "validation_guidance": 1.0,
    "validation_lycoris_strength": 1.0,
    "validation_torch_compile": False,
}
FAMILIES = {
    "auraflow": (tiny.auraflow, {**OF_OTHERS, "model_flavour": "v0.3", "flow_schedule_shift": 1.73}),
    "flux": (tiny.flux, {**OF_SOME, "flux_lora_target": "all"}),
    "flux2": (tiny.flux2, OF_SOME),
    "hidream": (tiny.hidream, {**OF_SOME, "model_flavour": "full", "hidream_use_load_balancing_loss": True}),
    "longcat_image": (tiny.longcat_image, {**OF_SOME, "model_flavour": "final"}),
    "lumina2": (tiny.lumina2, {**OF_SOME, "flow_schedule_auto_shift": True, "flow_schedule_shift": 0.0}),
    "pixart_sigma": (tiny.pixart, OF_SOME),
    "qwen_image": (tiny.qwen_image, {**OF_OTHERS, "model_flavour": "v1.0", "base_model_precision": "int2-quanto"}),
    "sana": (tiny.sana, {**OF_SOME, "use_ema": True, "ema_update_interval": 25, "evaluation_type": "clip"}),
    "sd3": (tiny.sd3, {**OF_SOME, "validation_guidance": 1.0, "validation_guidance_skip_layers": [7, 8, 9]}),
    "sdxl": (tiny.sdxl, {**OF_SOME, "loss_type": "huber", "snr_gamma": 5}),
    "z_image": (tiny.z_image, {**OF_OTHERS, "model_flavour": "turbo"}),
    "cosmos": (tiny.cosmos, {**OF_SOME, "model_flavour": "2b", "flow_schedule_auto_shift": True, "flow_schedule_shift": 0.0}),
    "anima": (tiny.anima, {**OF_OTHERS, "model_flavour": "base-v1.0"}),
}


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Check a configuration beside a dataset file: the exit code, and what --json prints."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    for number in range(4):
        Image.new("RGB", (128, 128), (number, 0, 0)).save(f"images/{number}.png")
        Path(f"images/{number}.txt").write_text("a cat")
    entry = {"id": "cats", "type": "local", "instance_data_dir": "images", "caption_strategy": "textfile", "resolution": 128}
    Path("data.json").write_text(json.dumps([entry]))

    def check(values: dict[str, object], *flags: str) -> tuple[int, dict]:
        paths = {"data_backend_config": "data.json", "output_dir": "out", "pretrained_model_name_or_path": "model"}
        Path("config.json").write_text(json.dumps({**values, **paths}))
        code, output, _ = commands(capsys, "train")("config.json", "--dry-run", "--json", "--use_cpu", *flags)
        return code, json.loads("{" + output.partition("{")[2])  # after a line of DeepSpeed

    return check


@pytest.mark.parametrize("family", some(FAMILIES, "flux", "sana", "sdxl"))
def test_an_example_of_each_family_is_accepted_with_notices(family, dry_run):
    pipeline, keys = FAMILIES[family]
    pipeline(Path("model"))
    # Whether torchao is installed is another matter.
    code, shown = dry_run({**EVERYWHERE, **keys, "model_family": family}, "--base_model_precision=no_change")
    assert (code, shown.get("problems", [])) == (0, [])
    assert shown["steps"] == 100
    assert any("SimpleTuner's defaults are used" in notice and "lora_dropout = 0.1" in notice for notice in shown["notices"])


def test_all_that_an_example_asks_for_and_is_not_there_is_named_at_once(dry_run):
    keys = {"controlnet": True, "lora_type": "lycoris", "tread_config": {"routes": [1]}, "model_flavour": "kontext"}
    code, shown = dry_run({**EVERYWHERE, **OF_SOME, **keys, "model_family": "flux"})
    said = "\n".join(problem["message"] for problem in shown["problems"])
    assert code == 2
    for text in ("ControlNet is not", "lycoris_config, the file", "TREAD is not", "image editing is not"):
        assert text in said
