"""Drawing the validation prompts with the model as it is, on all ranks together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smalti.config import DataOptions, ValidationOptions, sizes_in
from smalti.data import Bucket
from smalti.errors import UserError
from smalti.hookspecs import HookSpecs
from smalti.models import SampleRequest
from smalti.plugins import notify_each
from smalti.rundir import save_image
from smalti.training.failures.attempts import AttemptFailed, computed, on_all_ranks
from smalti.training.validation.running_stats import broadcast_running_stats
from smalti.types import ValidationImage, ValidationResult

if TYPE_CHECKING:
    from PIL.Image import Image

    from smalti.config import Config
    from smalti.training.run import Run


def shares(count: int, ranks: int, batch: int) -> list[list[list[int]]]:
    """Which prompts each rank samples: shares[rank] is a list of batches of prompt numbers.

    Every rank gets the same number of batches of the same size, because under a sharded model each forward pass is collective;
    the last batch is filled with the last prompt.
    """
    each = -(-count // ranks)
    padded = [min(number, count - 1) for number in range(each * ranks)]
    rows = [padded[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return [[row[start : start + batch] for start in range(0, each, batch)] for row in rows]


def validation_sizes(config: Config, alignment: int) -> tuple[Bucket, ...]:
    """The sizes of validation images. Raises UserError if the model cannot sample one of them."""
    text = config[ValidationOptions].validation_resolution
    if text is None:
        data = config[DataOptions]
        size = _fitting((data.resolution * 1e6) ** 0.5 if data.resolution_type == "area" else data.resolution, alignment)
        return (Bucket(size, size),)
    sizes = [Bucket(width, height) for width, height in sizes_in(text)]
    if strange := [str(size) for size in sizes if size.width % alignment or size.height % alignment]:
        fitting = [f"{_fitting(size.width, alignment)}x{_fitting(size.height, alignment)}" for size in sizes]
        raise UserError(
            f"validation_resolution={text}: this model samples multiples of {alignment} pixels, which {' and '.join(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} not",
            fix=f"--validation_resolution={','.join(fitting)}",
        )
    return tuple(sizes)


def _fitting(edge: float, alignment: int) -> int:
    return max(alignment, round(edge / alignment) * alignment)


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
    sizes = on_all_ranks(run.parallel, lambda: validation_sizes(run.config, run.family.alignment))
    with run.phases.during("validating"), eval_mode(run) as model, run.parallel.autocast():
        sampled = computed(run, lambda: [each for place, size in enumerate(sizes) for each in _sample(run, model, place, size)])
    folder = run.directory.samples_at(run.state.step)
    images = _images(run.config, folder, sizes)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels, settings in sampled if run.world.rank % run.world.context == 0 else ():
            _write(run, images[number], pixels, settings)

    on_all_ranks(run.parallel, write)
    result = ValidationResult(step=run.state.step, images=images, folder=folder)
    notify_each(run.plugins, HookSpecs.on_validation, run.state, result=result)
    return result


def _sample(run: Run, model: nn.Module, place: int, size: Bucket) -> Iterator[tuple[int, Image, dict[str, float]]]:
    """This rank's images of one size, in host memory, by number, with the settings to reproduce each.

    They are written later, when no other rank waits for this one.
    """
    options = run.config[ValidationOptions]
    prompts = options.validation_prompt
    for numbers in shares(len(prompts), run.world.data_size, options.validation_batch_size)[run.world.data_rank]:
        wanted = [prompts[number] for number in numbers]
        request = SampleRequest(
            prompts=wanted,
            seeds=[options.validation_seed + number for number in numbers],
            width=size.width,
            height=size.height,
            steps=options.validation_num_inference_steps,
            guidance=options.validation_guidance,
            objective=run.loss.objective,
            conditioning=run.encoded.conditioning(wanted, run.world.device),
            unconditional=run.encoded.conditioning([""] * len(wanted), run.world.device),
        )
        settings = {"guidance": request.guidance, **run.family.sampling_settings(request)}
        for number, pixels in zip(numbers, run.family.sample(model, request), strict=True):
            yield place * len(prompts) + number, _as_image(pixels), settings


def _images(config: Config, folder: Path, sizes: Sequence[Bucket]) -> tuple[ValidationImage, ...]:
    """All prompts at the first size, then at the next. Files are named by their size where there are several."""
    options, prompts = config[ValidationOptions], shown_prompts(config)
    return tuple(
        ValidationImage(
            prompt=prompt,
            seed=options.validation_seed + number,
            path=folder / f"{_file_name(number, prompt)}{f'-{size}' if len(sizes) > 1 else ''}.png",
        )
        for size in sizes
        for number, prompt in enumerate(prompts)
    )


def shown_prompts(config: Config) -> tuple[str, ...]:
    """The prompts as files, events and names have them: with {env:NAME} where that was written."""
    prompts, shown = config[ValidationOptions].validation_prompt, config.shown("validation_prompt")
    if isinstance(shown, tuple) and len(shown) == len(prompts):
        return shown
    return tuple(f"prompt {number}" for number in range(len(prompts)))  # a variable holds them all


def _file_name(number: int, prompt: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
    return f"{number:02d}-{words or 'image'}"


def _write(run: Run, image: ValidationImage, pixels: Image, settings: dict[str, float]) -> None:
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
