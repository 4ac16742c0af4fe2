"""Sampling the validation images with the model as it is, on all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smalti import HookSpecs, ValidationImage, ValidationResult
from smalti.models import SampleRequest
from smalti.plugins import notify_each
from smalti.training import Run, computed, on_all_ranks
from smalti_validation.drift import report_drift
from smalti_validation.eval_mode import eval_mode
from smalti_validation.options import ValidationOptions
from smalti_validation.plan import PlannedImage, batches, planned_images
from smalti_validation.png import save_image
from smalti_validation.prompts import ValidationPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

Settings = dict[str, Any]
"""What an image was sampled with, by name, for its metadata."""


def validate(run: Run, prompts: Sequence[ValidationPrompt], base_images: Collection[str] = ()) -> None:
    """Sample every prompt once at each of its sizes, write the images, notify the observers. *Collective*.

    `base_images` are the names of those that there are of the model before training. Raises AttemptFailed, on every rank.
    """
    run.state.validation_requested = False
    planned = on_all_ranks(run.parallel, lambda: planned_images(run.config, prompts, run.family.alignment))
    before, folder = run.directory.samples_at(0), run.directory.samples_at(run.state.step)
    images = sample_images(run, planned, folder, run.state.step)
    compared = [replace(image, base=before / image.path.name) if image.path.name in base_images else image for image in images]
    report(run, compared, folder, run.state.step)
    report_drift(run, compared, run.state.step)


def report(run: Run, images: Sequence[ValidationImage], folder: Path, step: int) -> None:
    """Notify the observers of the images of a step."""
    result = ValidationResult(step=step, images=tuple(images), folder=folder)
    notify_each(run.plugins, HookSpecs.on_validation, run.state, result=result)


def sample_images(run: Run, planned: Sequence[PlannedImage], folder: Path, step: int) -> list[ValidationImage]:
    """Sample images and write them into `folder`, as those of `step`. *Collective*. Raises AttemptFailed, on every rank."""
    with run.phases.during("validating"), eval_mode(run) as model, run.parallel.autocast():
        sampled = computed(run, lambda: list(_sample(run, model, planned)))
    images = [ValidationImage(prompt=each.prompt.shown, seed=each.prompt.seed, path=folder / each.file) for each in planned]

    def write() -> None:
        run.ownership.check()
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels, settings in sampled if run.world.rank % run.world.context == 0 else ():
            path, digest = images[number].path, run.config.digest
            save_image(path, pixels, step=step, config_digest=digest, run_id=run.info.id, **settings)

    on_all_ranks(run.parallel, write)
    return images


def _sample(run: Run, model: nn.Module, planned: Sequence[PlannedImage]) -> Iterator[tuple[int, Image, Settings]]:
    """This rank's images, in host memory, by number, with the settings to reproduce each.

    They are written later, when no other rank waits for this one.
    """
    world = run.world
    mine = batches(planned, world.data_size, run.config[ValidationOptions].validation_batch_size)[world.data_rank]
    for numbers in mine:
        images = [planned[number] for number in numbers]
        request = sampling_request(run, images)
        with _adapter_strength(run, model, images[0].prompt.adapter_strength):
            pixels = run.family.sample(model, request)
        for number, row in zip(numbers, pixels, strict=True):
            yield number, _as_image(row), settings_of(run, planned[number], request)


def sampling_request(run: Run, images: Sequence[PlannedImage], *, encoded: bool = True) -> SampleRequest:
    """For a batch of images of one size; without `encoded`, only its settings."""
    options, device = run.config[ValidationOptions], run.world.device
    prompts, negative = [image.prompt.prompt for image in images], [image.prompt.negative_prompt for image in images]
    return SampleRequest(
        prompts=prompts,
        negative_prompts=negative,
        seeds=[image.prompt.seed for image in images],
        width=images[0].size.width,
        height=images[0].size.height,
        steps=options.validation_num_inference_steps,
        guidance=options.validation_guidance,
        guidance_rescale=options.validation_guidance_rescale,
        objective=run.loss.objective,
        conditioning=run.encoded.conditioning(prompts, device) if encoded else None,
        unconditional=run.encoded.conditioning(negative, device, negative=True) if encoded else None,
    )


def _adapter_strength(run: Run, model: nn.Module, strength: float) -> AbstractContextManager[None]:
    """Within it, the trained adapter is scaled. Does nothing in a run without an adapter."""
    if run.adapter is None or strength == 1 or not run.family.scales_adapter:
        return nullcontext()
    return run.family.adapter_strength(model, strength)


def settings_of(run: Run, image: PlannedImage, request: SampleRequest | None = None) -> Settings:
    """The settings of an image, for its metadata. Those that change nothing are left out."""
    request, prompt = request or sampling_request(run, [image], encoded=False), image.prompt
    settings: Settings = {
        "prompt": prompt.shown,
        "seed": prompt.seed,
        "size": str(image.size),
        "inference_steps": request.steps,
        "guidance": request.guidance,
        **run.family.sampling_settings(request),
    }
    if prompt.negative_prompt is not None and not run.family.no_negative_prompt:
        settings["negative_prompt"] = str(run.config.masked(prompt.negative_prompt))
    if request.guidance_rescale:
        settings["guidance_rescale"] = request.guidance_rescale
    if run.adapter is not None and prompt.adapter_strength != 1:
        settings["adapter_strength"] = prompt.adapter_strength
    return settings


def _as_image(pixels: Tensor) -> Image:
    """(3, H, W) in [-1, 1] as an 8-bit image."""
    from PIL.Image import fromarray

    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return fromarray(levels.permute(1, 2, 0).cpu().numpy())
