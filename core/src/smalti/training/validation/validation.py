"""Sampling the validation images with the model as it is, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smalti.config import ValidationOptions, ValidationPrompt
from smalti.hookspecs import HookSpecs
from smalti.models import SampleRequest, ScalesAdapter
from smalti.plugins import notify_each
from smalti.rundir import save_image
from smalti.training.failures.attempts import AttemptFailed, computed, on_all_ranks
from smalti.training.validation.plan import PlannedImage, batches, planned_images
from smalti.training.validation.running_stats import broadcast_running_stats
from smalti.types import ValidationImage, ValidationResult

if TYPE_CHECKING:
    from PIL.Image import Image

    from smalti.training.run import Run

Settings = dict[str, str | float]
"""What an image was sampled with, by name, for its metadata."""


@contextmanager
def eval_mode(run: Run) -> Iterator[nn.Module]:
    """The unwrapped model in eval mode, with EMA weights if there are any, without gradients. *Collective*.

    Afterwards it is as before, bit for bit, except that running statistics are those of rank 0. After an exception that other
    ranks do not know of, no collective is called.
    """
    run.saver.wait_for_staging()  # the weights are about to change, and a checkpoint may still be copying them
    model = run.parallel.unwrap(run.model)
    broadcast_running_stats(model, run.parallel)
    model.eval()
    in_step = run.world.size == 1
    try:
        with ExitStack() as averaged, torch.no_grad():
            if (ema := run.ema) is not None:
                on_all_ranks(run.parallel, lambda: averaged.enter_context(ema.average_parameters()))
            run.parallel.state.invalidate_gathered()
            yield model
        in_step = True
    except AttemptFailed:
        in_step = True
        raise
    finally:
        model.train()
        if in_step:
            run.parallel.state.invalidate_gathered()


def validate(run: Run) -> ValidationResult:
    """Sample every prompt once at every size, write the images, notify the observers. *Collective*.

    Raises AttemptFailed, on every rank.
    """
    run.state.validation_requested = False
    planned = on_all_ranks(run.parallel, lambda: planned_images(run.config, run.prompts, run.family.alignment))
    with run.phases.during("validating"), eval_mode(run) as model, run.parallel.autocast():
        sampled = computed(run, lambda: list(_sample(run, model, planned)))
    folder = run.directory.samples_at(run.state.step)
    images = tuple(
        ValidationImage(prompt=each.prompt.shown, seed=each.prompt.seed, path=folder / each.file) for each in planned
    )

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels, settings in sampled if run.world.rank % run.world.context == 0 else ():
            _write(run, images[number], pixels, settings)

    on_all_ranks(run.parallel, write)
    result = ValidationResult(step=run.state.step, images=images, folder=folder)
    notify_each(run.plugins, HookSpecs.on_validation, run.state, result=result)
    return result


def _sample(run: Run, model: nn.Module, planned: Sequence[PlannedImage]) -> Iterator[tuple[int, Image, Settings]]:
    """This rank's images, in host memory, by number, with the settings to reproduce each.

    They are written later, when no other rank waits for this one.
    """
    world = run.world
    mine = batches(planned, world.data_size, run.config[ValidationOptions].validation_batch_size)[world.data_rank]
    for numbers in mine:
        images = [planned[number] for number in numbers]
        request = _request(run, images)
        with _adapter_strength(run, model, images[0].prompt.adapter_strength):
            pixels = run.family.sample(model, request)
        for number, row in zip(numbers, pixels, strict=True):
            yield number, _as_image(row), _settings(run, planned[number].prompt, request)


def _request(run: Run, images: Sequence[PlannedImage]) -> SampleRequest:
    """For a batch of images of one size."""
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
        conditioning=run.encoded.conditioning(prompts, device),
        unconditional=run.encoded.conditioning(negative, device, negative=True),
    )


def _adapter_strength(run: Run, model: nn.Module, strength: float) -> AbstractContextManager[None]:
    """Within it, the trained adapter is scaled. Does nothing in a run without an adapter."""
    if run.adapter is None or strength == 1 or not isinstance(run.family, ScalesAdapter):
        return nullcontext()
    return run.family.adapter_strength(model, strength)


def _settings(run: Run, prompt: ValidationPrompt, request: SampleRequest) -> Settings:
    """The settings of an image, apart from prompt and seed. Those that change nothing are left out."""
    settings: Settings = {"guidance": request.guidance, **run.family.sampling_settings(request)}
    if prompt.negative_prompt and not run.family.no_negative_prompt:
        settings["negative_prompt"] = str(run.config.masked(prompt.negative_prompt))
    if request.guidance_rescale:
        settings["guidance_rescale"] = request.guidance_rescale
    if run.adapter is not None and prompt.adapter_strength != 1:
        settings["adapter_strength"] = prompt.adapter_strength
    return settings


def _write(run: Run, image: ValidationImage, pixels: Image, settings: Settings) -> None:
    """Write an image, with the settings to reproduce it in its metadata."""
    save_image(
        image.path,
        pixels,
        prompt=image.prompt,
        seed=image.seed,
        step=run.state.step,
        config_digest=run.config.digest,
        run_id=run.info.id,
        inference_steps=run.config[ValidationOptions].validation_num_inference_steps,
        **settings,
    )


def _as_image(pixels: Tensor) -> Image:
    """(3, H, W) in [-1, 1] as an 8-bit image."""
    from PIL.Image import fromarray

    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return fromarray(levels.permute(1, 2, 0).cpu().numpy())
