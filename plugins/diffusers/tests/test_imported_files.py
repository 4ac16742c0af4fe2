"""What `smalti config import` makes of the files of other trainers passes a dry run, once paths are right."""

import json
from pathlib import Path

import pytest
import tiny
from PIL import Image

from smalti.cli.entry import main

KOHYA = {
    "run.sh": r"""
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py --pretrained_model_name_or_path=MODEL \
  --dataset_config=dataset.toml --output_dir=out --output_name=zwx --network_module=networks.lora_flux --network_dim=16 \
  --network_alpha=8 --optimizer_type=AdamW8bit --learning_rate=1e-4 --lr_scheduler=cosine --lr_warmup_steps=0.1 --sdpa \
  --max_train_steps=200 --mixed_precision=bf16 --gradient_checkpointing --guidance_scale=1.0 --timestep_sampling=flux_shift \
  --model_prediction_type=raw --cache_latents --save_every_n_steps=50 --sample_prompts=prompts.txt --max_grad_norm=0.5
""",
    "dataset.toml": """
[general]
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
resolution = [128, 128]
batch_size = 2
[[datasets.subsets]]
image_dir = "IMAGES"
class_tokens = "zwx cat"
num_repeats = 5
""",
    "prompts.txt": "a photo of zwx cat --w 128 --h 128 --d 1 --s 4\n",
}
AI_TOOLKIT = {
    "lora.yaml": """
job: extension
config:
  name: zwx
  process:
  - type: sd_trainer
    training_folder: out
    trigger_word: zwx
    network: {type: lora, linear: 16, linear_alpha: 8}
    save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4, push_to_hub: false}
    datasets:
    - {folder_path: IMAGES, caption_ext: txt, default_caption: a cat, caption_dropout_rate: 0.05, resolution: [128, 192]}
    train:
      {batch_size: 1, steps: 400, gradient_accumulation_steps: 2, train_unet: true, train_text_encoder: false,
       gradient_checkpointing: true, noise_scheduler: flowmatch, optimizer: adamw8bit, lr: 1e-4, dtype: bf16,
       ema_config: {use_ema: true, ema_decay: 0.99}}
    model: {name_or_path: MODEL, arch: "flux", quantize: false}
    sample:
      {sampler: flowmatch, sample_every: 250, width: 128, height: 128, prompts: ["[trigger] on a chair"], neg: "", seed: 42,
       walk_seed: true, guidance_scale: 4, sample_steps: 20}
meta: {name: "[name]", version: '1.0'}
""",
}
ONETRAINER = {
    "config.json": """
{"__version": 10, "base_model_name": "MODEL", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA",
 "batch_size": 2, "learning_rate": 0.0003, "epochs": 50, "resolution": "128", "lora_rank": 32, "lora_alpha": 16.0,
 "unet": {"train": true, "weight_dtype": "BFLOAT_16"}, "text_encoder": {"train": false, "dropout_probability": 0.1},
 "text_encoder_2": {"train": false}, "train_dtype": "BFLOAT_16", "ema": "CPU", "concept_file_name": "concepts.json",
 "sample_definition_file_name": "samples.json", "loss_weight_fn": "MIN_SNR_GAMMA",
 "learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 20,
 "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.02, "fused": false}, "workspace_dir": "ws/run"}
""",
    "concepts.json": """
[{"name": "cats", "path": "IMAGES", "enabled": true, "balancing": 1.0, "image": {"enable_random_flip": false},
  "text": {"prompt_source": "filename", "tag_delimiter": ","}}]
""",
    "samples.json": """
[{"enabled": true, "prompt": "a cat", "height": 128, "width": 128, "seed": 4, "diffusion_steps": 20, "cfg_scale": 7.0}]
""",
}
SIMPLETUNER = {
    "config.json": """
{"--model_family": "flux", "--model_type": "lora", "--lora_type": "standard", "--lora_rank": 8, "--optimizer": "adamw_bf16",
 "--learning_rate": "1e-4", "--lr_scheduler": "constant", "--max_train_steps": 200, "--num_train_epochs": 0,
 "--data_backend_config": "multidatabackend.json", "--output_dir": "out", "--pretrained_model_name_or_path": "MODEL",
 "--vae_batch_size": 4, "--push_to_hub": false, "--report_to": "none", "--validation_prompt": "a cat", "--resolution": 128,
 "--train_batch_size": 2, "--validation_resolution": "128x128", "--resolution_type": "pixel"}
""",
    "multidatabackend.json": """
[{"id": "my cats", "type": "local", "instance_data_dir": "IMAGES", "caption_strategy": "filename", "resolution": 128,
  "cache_dir_vae": "cache/{model_family}", "metadata_backend": "discovery", "crop": true, "skip_file_discovery": ""},
 {"id": "texts", "type": "local", "dataset_type": "text_embeds", "default": true, "cache_dir": "cache/texts"}]
""",
}
FILES = {
    "SimpleTuner": (SIMPLETUNER, ["config.json"], tiny.flux),
    "kohya": (KOHYA, ["run.sh"], tiny.flux),
    "ai-toolkit": (AI_TOOLKIT, ["lora.yaml"], tiny.flux),
    "OneTrainer": (ONETRAINER, ["config.json"], tiny.sdxl),
}


@pytest.mark.parametrize("trainer", FILES)
def test_an_imported_configuration_passes_a_dry_run(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files, given, pipeline = FILES[trainer]
    pipeline(Path("model"))
    Path("images").mkdir()
    for number in range(8):
        Image.new("RGB", (128, 128), (number, 0, 0)).save(f"images/{number}.png")
    for name, text in files.items():
        Path(name).write_text(text.replace("MODEL", "model").replace("IMAGES", "images"))
    assert exit_code("config", "import", *given, "--to=config.toml") == 0
    assert exit_code("train", "config.toml", "--dry-run", "--json", "--use_cpu") == 0, capsys.readouterr().err
    shown = json.loads("{" + capsys.readouterr().out.partition("{")[2])  # after a line of DeepSpeed
    assert (shown["effective_batch"], shown["steps"]) == (2, 200)


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)
