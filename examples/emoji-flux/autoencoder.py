"""Train a small autoencoder on images of 64 x 64, in the layout that diffusers loads: four channels at a quarter of the size.

    python autoencoder.py demo/emoji demo/flux/vae

Two to three minutes on two CPU cores for 207,000 parameters. Nothing is done when the autoencoder is there already.

Shapes: N images, B images of a step, pixels (N, 3, H, W) in [-1, 1], latents (N, 4, H / 4, W / 4).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from PIL import Image
from torch import Tensor

BATCH, HELD_OUT = 32, 64


def main() -> None:
    """Read the command line, train, report the reconstruction quality on unseen images, save."""
    parser = argparse.ArgumentParser(description="Train a small autoencoder on a folder of images.")
    parser.add_argument("images", type=Path, help="folder of PNG images, all of one size")
    parser.add_argument("outdir", type=Path, help="folder for config.json and the weights")
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps (default: 700)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.outdir / "config.json").exists():
        print(f"{arguments.outdir} is there already")
        return
    pixels = load(arguments.images)
    if len(pixels) < 2 * HELD_OUT:
        parser.error(f"{arguments.images} holds {len(pixels)} PNG images; {2 * HELD_OUT} are needed")
    torch.manual_seed(arguments.seed)
    pixels = pixels[torch.randperm(len(pixels))]
    seen, unseen = pixels[HELD_OUT:], pixels[:HELD_OUT]
    model = train(seen, arguments.steps)
    print(f"{decibels(model, unseen):.1f} dB on {HELD_OUT} images that it has not seen")
    calibrate(model, seen)
    model.save_pretrained(arguments.outdir)
    print(f"autoencoder of {sum(parameter.numel() for parameter in model.parameters()):,} parameters in {arguments.outdir}")


def load(folder: Path) -> Tensor:
    """All images, (N, 3, H, W) in [-1, 1]."""
    images = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(pixels: Tensor, steps: int) -> AutoencoderTiny:
    """L1 plus squared error, with a learning rate that falls to zero."""
    widths, once = (32, 32, 32), (1, 1, 1)
    model = AutoencoderTiny(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=once,
        num_decoder_blocks=once,
        latent_channels=4,
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(1, steps + 1):
        batch = pixels[torch.randint(len(pixels), (BATCH,))].contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            back = there_and_back(model, batch).float()
        loss = F.l1_loss(back, batch) + F.mse_loss(back, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            left = (time.monotonic() - begin) / step * (steps - step)
            print(f"autoencoder: step {step}/{steps}  loss {loss.item():.4f}  {left:.0f} s left", file=sys.stderr)
    return model.to(memory_format=torch.contiguous_format).eval()


def there_and_back(model: AutoencoderTiny, pixels: Tensor) -> Tensor:
    """Not by calling the model, which rounds latents to 256 levels: no gradient gets through that."""
    return model.decode(model.encode(pixels).latents).sample


@torch.no_grad()
def decibels(model: AutoencoderTiny, pixels: Tensor) -> float:
    """Peak signal-to-noise ratio of images reconstructed by the autoencoder."""
    error = F.mse_loss(there_and_back(model, pixels).clamp(-1, 1), pixels)
    return float(10 * torch.log10(4 / error))


@torch.no_grad()
def calibrate(model: AutoencoderTiny, pixels: Tensor) -> None:
    """Note in the configuration by what latents are shifted and scaled to mean 0 and deviation 1."""
    latents = torch.cat([model.encode(part).latents for part in pixels.split(256)])
    model.register_to_config(shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std()))


if __name__ == "__main__":
    main()
