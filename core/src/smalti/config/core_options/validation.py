"""Options of validation images and of the evaluation loss."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from smalti.config.options import Options, Texts, option

LARGEST_IMAGE = 89_478_485
"""Pixels of an image that is sampled: as many as one may have that is read."""


def sizes_in(text: str) -> tuple[tuple[int, int], ...]:
    """Widths and heights from words such as 512 or 512x768,768x512. Raises ValueError for anything else."""
    sizes: dict[tuple[int, int], None] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*[xX]\s*(\d{1,9}))?\s*", word)
        if match is None:
            raise ValueError("write 512, or 512x768 for width and height; separate several with commas")
        width, height = int(match[1]), int(match[2] or match[1])
        if not 0 < width * height <= LARGEST_IMAGE:
            raise ValueError(f"an image has at least one pixel and at most {LARGEST_IMAGE // 1_000_000} million")
        sizes[width, height] = None
    return tuple(sizes)


def _sizes(value: str | None) -> str | None:
    if value is not None:
        sizes_in(value)
    return value


class ValidationOptions(Options):
    validation_prompt: Texts = option(
        (), help="Prompt of a validation image. Repeat the flag for several.", aliases=["validation_prompts"]
    )
    validation_step_interval: int = option(
        0,
        help="Generate validation images every N steps and at the end. 0: only at the end.",
        aliases=["validation_steps"],
        ge=0,
    )
    validation_seed: int = option(42, help="Seed of the first validation image; the next ones count up.", ge=0)
    validation_resolution: Annotated[str | None, AfterValidator(_sizes)] = option(
        None,
        help="Sizes of validation images, such as 512 or 512x768,768x512. Default: the training resolution.",
    )
    validation_num_inference_steps: int = option(25, help="Denoising steps per validation image.", ge=1, le=1_000)
    validation_guidance: float = option(
        3.0, help="Classifier-free guidance scale of validation images. 1 disables guidance.", ge=0
    )
    validation_batch_size: int = option(8, help="Images to sample or evaluate at once per rank.", level="advanced", ge=1)
    eval_steps_interval: int = option(
        0, help="Measure the loss on eval datasets every N steps and at the end. 0: only at the end.", ge=0
    )
    eval_epoch_interval: int = option(0, help="Also evaluate every N epochs. 0: never.", ge=0)
    eval_timesteps: int = option(
        5, help="Number of equally spaced noise levels per evaluated image.", level="advanced", ge=1, le=500
    )
    num_eval_images: int | None = option(
        None, help="Evaluate on this many images of each eval dataset, always the same ones. Default: all.", ge=1
    )
