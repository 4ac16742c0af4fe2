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
FILES = {"kohya": (KOHYA, ["run.sh"], tiny.flux)}


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
