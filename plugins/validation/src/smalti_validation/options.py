"""Options of validation images and of the evaluation loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from smalti import Options, Texts, option

LARGEST_IMAGE = 89_478_485
"""Pixels of an image that is sampled: as many as one may have that is read."""

STRONGEST = 100.0
"""The largest factor on an adapter, in both directions."""


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
    validation_prompt_library: Path | None = option(
        None,
        help="File of more validation prompts, by name (TOML, JSON or YAML). Entries can set negative prompt, sizes and seed.",
        aliases=["user_prompt_library"],
    )
    validation_negative_prompt: str | None = option(
        None, help='Negative prompt of validation images. "" is the empty text, which SDXL tells from none.'
    )
    validation_step_interval: int = option(
        0,
        help="Generate validation images every N steps and at the end. 0: only at the end.",
        aliases=["validation_steps"],
        ge=0,
    )
    validation_seed: int = option(
        42, help="Seed of the first validation prompt; the next ones count up. Prompts of the library all have it.", ge=0
    )
    validation_resolution: Annotated[str | None, AfterValidator(_sizes)] = option(
        None,
        help="Sizes of validation images, such as 512 or 512x768,768x512. Default: the training resolution.",
    )
    validation_num_inference_steps: int = option(25, help="Denoising steps per validation image.", ge=1, le=1_000)
    validation_guidance: float = option(
        3.0, help="Classifier-free guidance scale of validation images. 1 disables guidance.", ge=0
    )
    validation_guidance_rescale: float = option(
        0.0,
        help="Rescale guided predictions against overexposure; 0.7 is the published value. 0 disables it.",
        level="advanced",
        ge=0,
        le=1,
    )
    validation_adapter_strength: float = option(
        1.0,
        help="Factor on the LoRA in validation images. 0 gives the base model.",
        level="advanced",
        when="model_type == lora",
        ge=-STRONGEST,
        le=STRONGEST,
    )
    validation_base_model: bool = option(
        False, help="Generate the images of the model before training too, once, for comparison."
    )
    validation_batch_size: int = option(8, help="Images to sample or evaluate at once per rank.", level="advanced", ge=1)
    clip_weights: Path | None = option(
        None, help="Folder of a CLIP model: scores how well validation images fit their prompts.", level="advanced"
    )
    dino_weights: Path | None = option(
        None, help="Folder of a DINOv2 model: scores how near validation images are to training images.", level="advanced"
    )
    score_images: int = option(256, help="Training images that scores compare with.", level="advanced", ge=1)
    eval_steps_interval: int = option(
        0, help="Measure the loss on eval datasets every N steps and at the end. 0: only at the end.", ge=0
    )
    eval_epoch_interval: int = option(0, help="Also evaluate every N epochs. 0: never.", level="advanced", ge=0)
    keep_best: int = option(
        0,
        help="Never remove the N checkpoints with the lowest loss in evaluations; one that is among them is saved. 0: no such.",
        ge=0,
    )
    eval_patience: int = option(
        0,
        help="End the run after N evaluations in a row that did not clearly improve their loss: 95 % confidence. 0: never.",
        ge=0,
    )

    @property
    def samples_images(self) -> bool:
        """Whether the run has prompts."""
        return bool(self.validation_prompt) or self.validation_prompt_library is not None
