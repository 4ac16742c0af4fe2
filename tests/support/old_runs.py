"""Runs that an older version began, for the test that this version resumes them.

`python tests/support/old_runs.py SMALTI ARCHIVE RUN...` makes them with the command SMALTI of that version: `sharded`, a full
run of the toy family; `adapter`, one of a small PixArt with encoded images and texts; `plain`, a full run in one process. Each
has a checkpoint at step 2, and the losses of the four steps that the older version itself made. Archives are never made anew:

    runs-0.1.0a.tar.xz    sharded and adapter, of the commit b960946: format 2 of checkpoints
    runs-format-1.tar.xz  plain, of the commit e2f3a867, the last with format 1
    runs-0.2.0.tar.xz     plain, of version 0.2.0
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RUNS = {
    "sharded": (
        "--model_family=toy --toy_width=8 --toy_depth=1 --toy_heads=1 --toy_patch=4 --resolution=16 --use_ema "
        "--num_processes=2 --fsdp_enable"
    ),
    "adapter": (
        "--model_family=pixart --pretrained_model_name_or_path=base --model_type=lora --lora_rank=2 --resolution=32 "
        "--aspect_bucket_alignment=32"
    ),
}
RUNS["plain"] = RUNS["sharded"].replace(" --use_ema --num_processes=2 --fsdp_enable", "")
SHARED = (
    "--resolution_type=pixel --instance_data_dir=photos --train_batch_size=2 --checkpoint_step_interval=2 --mixed_precision=no "
    "--learning_rate=1e-3"
)


def pipeline(folder: Path) -> None:
    """A small PixArt whose weights are the same numbers on every processor: no generator of random numbers makes them."""
    import tiny
    import torch
    from safetensors.torch import load_file, save_file

    tiny.pixart(folder)
    for path in folder.rglob("config.json"):  # which counts as a part of the model
        path.write_text(re.sub(r'("transformers_version": )"[^"]*"', r'\1"5.23.0"', path.read_text()))
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            if tensor.is_floating_point():
                steps = (torch.arange(tensor.numel()) * 7919 + number) % 251
                tensors[name] = ((steps - 125).float() / 1024).view(tensor.shape).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})


def losses(run: Path) -> list[float]:
    """Of the steps in the events of a run, in their order."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["type"] == "step"]


def photos(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for number in range(8):
        Image.new("RGB", (16, 16), (30 * number, 255 - 30 * number, 100)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"colour {number}")
        os.utime(folder / f"{number}.png", (1_700_000_000, 1_700_000_000))  # whole seconds, which an archive keeps


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without the picture, and without names of this machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.name.endswith("/loss.png") else member


def main(smalti: str, archive: Path, *runs: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/diffusers/tests"))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        photos(place / "photos")
        if "adapter" in runs:
            pipeline(place / "base")
        expected = {}
        for run in runs:
            for steps, output in ((2, run), (4, f"{run}-longer")):
                words = [*RUNS[run].split(), *SHARED.split(), f"--output_dir={output}", f"--max_train_steps={steps}"]
                subprocess.run([smalti, "train", *words], cwd=place, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            expected[run] = losses(place / f"{run}-longer")
        (place / "losses.json").write_text(json.dumps(expected))
        with tarfile.open(archive, "w:xz") as tar:
            for each in (*runs, "photos", "losses.json"):
                tar.add(place / each, each, filter=_kept)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
