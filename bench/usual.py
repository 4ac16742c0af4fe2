"""The usual way to fine-tune SDXL: one file in the shape of diffusers' example, with Accelerate around it.

    accelerate launch usual.py MODEL IMAGES --out times.txt

Parts are loaded with `from_pretrained`, captions and images are encoded before training and kept in memory, then the encoders
go. The example also has what is left out here: trackers, checkpoints, validation, and reading images through `datasets` and
`torchvision`. `bench/first_step.py` starts it.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers.models.auto import AutoTokenizer
from transformers.models.clip import CLIPTextModel, CLIPTextModelWithProjection


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune SDXL in the usual way, and write down when each step ended.")
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, help="PNG images of one size, each with a caption in a text file beside it")
    parser.add_argument("--out", type=Path, required=True, help="file for the time at the end of each step, in unix seconds")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if arguments.precision == "bf16" else "no")
    set_seed(0)
    samples = encoded(arguments.model, arguments.images, arguments.batch, accelerator)
    unet = UNet2DConditionModel.from_pretrained(arguments.model, subfolder="unet")  # type: ignore[no-untyped-call]
    unet.train()
    noises = DDPMScheduler.from_pretrained(arguments.model, subfolder="scheduler")  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    schedule = get_scheduler("constant", optimizer=optimizer)
    loader: DataLoader[dict[str, Tensor]] = DataLoader(
        cast(Dataset[dict[str, Tensor]], samples), shuffle=True, batch_size=arguments.batch
    )
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    ends: list[float] = []
    while len(ends) < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = batch["latents"]
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, noises.config.num_train_timesteps, (len(latents),)).long()
                noisy = noises.add_noise(latents, noise, timesteps)
                extra = {"time_ids": batch["sizes"], "text_embeds": batch["pooled"]}
                prediction = unet(noisy, timesteps, batch["tokens"], added_cond_kwargs=extra, return_dict=False)[0]
                loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
                accelerator.gather(loss.repeat(arguments.batch)).mean().item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ends.append(time.time())
            if len(ends) == arguments.steps:
                break
    if accelerator.is_main_process:
        arguments.out.write_text("\n".join(map(repr, ends)))
    accelerator.end_training()


def encoded(model: Path, images: Path, batch: int, accelerator: Accelerator) -> list[dict[str, Tensor]]:
    """Latents and embeddings of all samples: in every process, as the example does it. The encoders are gone afterwards."""
    tokenizers = [AutoTokenizer.from_pretrained(model, subfolder=f"tokenizer{n}", use_fast=False) for n in ("", "_2")]
    encoders = [
        CLIPTextModel.from_pretrained(model, subfolder="text_encoder"),
        CLIPTextModelWithProjection.from_pretrained(model, subfolder="text_encoder_2"),
    ]
    for encoder in encoders:
        encoder.requires_grad_(False)
        encoder.to(accelerator.device, torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32)
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae")  # type: ignore[no-untyped-call]
    vae.requires_grad_(False)
    samples: list[dict[str, Tensor]] = []
    paths = sorted(images.glob("*.png"))
    for first in range(0, len(paths), batch):
        some = paths[first : first + batch]
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in some])
        captions = [path.with_suffix(".txt").read_text() for path in some]
        with torch.no_grad():
            scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
            latents = vae.encode(scaled).latent_dist.sample() * vae.config.scaling_factor
            tokens, pooled = embeddings(captions, tokenizers, encoders)
        height, width = pixels.shape[1:3]
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)
        samples += [
            {"latents": latents[row], "tokens": tokens[row], "pooled": pooled[row], "sizes": sizes} for row in range(len(some))
        ]
    del tokenizers, encoders, vae
    gc.collect()
    return samples


def embeddings(captions: list[str], tokenizers: list[Any], encoders: list[Any]) -> tuple[Tensor, Tensor]:
    """Both encoders' last hidden states but one, beside each other, and the second one's pooled answer."""
    found = []
    for tokenizer, encoder in zip(tokenizers, encoders, strict=True):
        length = tokenizer.model_max_length
        ids = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        answer = encoder(ids.to(encoder.device), output_hidden_states=True)
        pooled = answer[0]
        found.append(answer.hidden_states[-2])
    return torch.cat(found, dim=-1).float(), pooled.float()


if __name__ == "__main__":
    main()
