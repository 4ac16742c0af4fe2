"""A training step of a small SDXL under smalti, everything included, against the usual script.

The script has the shape of diffusers' example for SDXL: Accelerate around U-Net, optimizer and schedule, latents
and text embeddings made before training, noise by the pipeline's own scheduler. Both train the same U-Net on the same images
with the same batch, precision, optimizer and clipping. Five steps of one, then five of the other, in one process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from run import Result, paired, precision_of
from sizes import sized
from step import ROOT, ROUND, alternated, opened

from smalti.models import latents_of
from smalti.parallel import in_bf16
from smalti.training.run import Run
from smalti_diffusers.families.sdxl import Sdxl

ROUNDS, BATCH, EDGE = sized(20, short=1), 8, 64


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        place = Path(folder)
        arguments = [f"--instance_data_dir={images(place / 'images')}", f"--output_dir={place}/run"]
        arguments += ["--model_family=sdxl", f"--pretrained_model_name_or_path={tiny_pipeline(place / 'model')}"]
        arguments += [
            f"--resolution={EDGE}",
            "--resolution_type=pixel",
            f"--train_batch_size={BATCH}",
            "--mixed_precision=auto",
        ]
        arguments += [f"--max_train_steps={ROUND * (ROUNDS + 1)}", "--checkpoint_step_interval=0", "--use_cpu"]
        run = opened(arguments, closing)
        ours, peer = alternated(run, by_script(run))
        precision = precision_of(run.config)
    return [paired("sdxl: smalti against the usual script", ours, peer, unit="s/step", goal=0.95, precision=precision)]


def tiny_pipeline(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT / "plugins/diffusers/tests"))
    import tiny

    return Path(tiny.sdxl(folder))


def images(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir()
    for number in range(4 * BATCH):
        Image.new("RGB", (EDGE, EDGE), (number * 7, 255 - number * 7, 99)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"colour {number}")
    return folder


def by_script(run: Run) -> Callable[[], None]:
    """One step of the script on a second U-Net like the run's."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the precision that smalti asked it for: none
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if in_bf16(run.config) else "no")
    unet = run.family.build_model()
    weights = run.family.weights(0)
    unet.load_state_dict({name: weights.get(name).clone() for name in weights.names()})
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    schedule = get_scheduler("constant", optimizer=optimizer)
    unet, optimizer, schedule = accelerator.prepare(unet, optimizer, schedule)
    noises = DDPMScheduler.from_config(cast(Sdxl, run.family).components.config("scheduler"))  # type: ignore[no-untyped-call]
    first = next(iter(run.batches)).micro[0]
    latents, conditioning = latents_of(run.family, first.pixels, first.latents), first.conditioning
    assert conditioning is not None, "texts were encoded before training"
    sizes = torch.tensor([[EDGE, EDGE, 0, 0, EDGE, EDGE]], dtype=torch.float32).repeat(BATCH, 1)

    def step() -> None:
        with accelerator.accumulate(unet):
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, noises.config.num_train_timesteps, (BATCH,))
            noisy = noises.add_noise(latents, noise, timesteps)
            extra = {"time_ids": sizes, "text_embeds": conditioning["pooled"]}
            prediction = unet(noisy, timesteps, conditioning["tokens"], added_cond_kwargs=extra, return_dict=False)[0]
            loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
            accelerator.gather(loss.repeat(BATCH)).mean().item()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return step
