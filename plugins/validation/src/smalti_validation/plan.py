"""Which validation images there are, how large, in which files, and which rank samples which of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smalti import Config, ConfigError, Problem, UserError, problems_in
from smalti.config import DataOptions, ModelOptions
from smalti.data import Bucket
from smalti.models import ModelFamily
from smalti.rundir import CONTACT_SHEET
from smalti_validation.options import ValidationOptions, sizes_in
from smalti_validation.prompts import ValidationPrompt


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """One image of every validation: a prompt at a size. `file` is its name in the folder of the validation."""

    prompt: ValidationPrompt
    size: Bucket
    file: str


def planned_images(config: Config, prompts: Sequence[ValidationPrompt], alignment: int) -> tuple[PlannedImage, ...]:
    """All prompts at their first size, then at the next. Files are named by their size where a prompt has several.

    Raises ConfigError with every size that the model cannot sample, and UserError for two images with the same file.
    """
    of_run = _sizes_of_run(config, alignment)
    problems = [problem for prompt in prompts for problem in _size_problems(prompt.sizes, prompt.where, alignment)]
    if any(not prompt.sizes for prompt in prompts):
        text, option = config[ValidationOptions].validation_resolution, "validation_resolution"
        problems += _size_problems(of_run, f"{option}={text}", alignment, option)
    if problems:
        raise ConfigError(problems)
    sizes = [[Bucket(*size) for size in prompt.sizes or of_run] for prompt in prompts]
    planned = [
        PlannedImage(prompt=prompt, size=own[place], file=f"{prompt.stem}{f'-{own[place]}' if len(own) > 1 else ''}.png")
        for place in range(max(map(len, sizes), default=0))
        for prompt, own in zip(prompts, sizes, strict=True)
        if place < len(own)
    ]
    taken: dict[str, str] = {CONTACT_SHEET.casefold(): "the contact sheet"}
    for image in planned:
        other = taken.setdefault(image.file.casefold(), image.prompt.where)
        if other is not image.prompt.where:
            raise UserError(
                f"{image.prompt.where} and {other} have the same file name, {image.file}", fix="give them other names"
            )
    return tuple(planned)


def _sizes_of_run(config: Config, alignment: int) -> tuple[tuple[int, int], ...]:
    """The sizes of prompts that have none of their own."""
    text, data = config[ValidationOptions].validation_resolution, config[DataOptions]
    if text is not None:
        return sizes_in(text)
    edge = _fitting((data.resolution * 1e6) ** 0.5 if data.resolution_type == "area" else data.resolution, alignment)
    return ((edge, edge),)


def _size_problems(sizes: Sequence[tuple[int, int]], where: str, alignment: int, option: str = "") -> Iterator[Problem]:
    """The sizes that a model cannot sample. With `option`, they are its value; else of a library's entry."""
    if strange := [f"{width}x{height}" for width, height in sizes if width % alignment or height % alignment]:
        are = "is" if len(strange) == 1 else "are"
        fitting = ",".join(f"{_fitting(width, alignment)}x{_fitting(height, alignment)}" for width, height in sizes)
        yield Problem(
            message=f"{where}: this model samples multiples of {alignment} pixels, which {' and '.join(strange)} {are} not",
            fix=f"--{option}={fitting}" if option else f'resolution = "{fitting}"',
            option=option,
        )


def _fitting(edge: float, alignment: int) -> int:
    return max(alignment, round(edge / alignment) * alignment)


def check_validation(config: Config, prompts: Sequence[ValidationPrompt], family: ModelFamily) -> list[str]:
    """Notices about settings without effect. Raises ConfigError with all that the family cannot sample."""
    options, problems, notices = config[ValidationOptions], list[Problem](), list[str]()
    try:
        planned_images(config, prompts, family.alignment)
    except UserError as error:
        problems += problems_in(error)
    if options.validation_guidance_rescale and (reason := _no_guidance_rescale(family)):
        message = f"validation_guidance_rescale={options.validation_guidance_rescale:g}: {reason}"
        problems.append(Problem(message=message, fix="--validation_guidance_rescale=0"))
    if any(prompt.negative_prompt for prompt in prompts) and (reason := _no_negative_prompt(config, family)):
        notices.append(f"negative prompts of validation images have no effect: {reason}")
    scaled = any(prompt.adapter_strength != 1 for prompt in prompts)
    if config[ModelOptions].model_type != "lora":
        if scaled:
            notices.append("adapter strengths of validation images have no effect unless model_type == lora")
    elif (scaled or options.validation_base_model) and not family.scales_adapter:
        message = f"{family.name} cannot scale its adapter in validation images"
        problems.append(Problem(message=message, fix="--validation_adapter_strength=1 --no_validation_base_model"))
    if problems:
        raise ConfigError(problems)
    return notices


def _no_guidance_rescale(family: ModelFamily) -> str:
    """Why guided predictions are not rescaled. A family that samples by itself has to say that it does it."""
    if family.no_guidance_rescale or type(family).sample is ModelFamily.sample:
        return family.no_guidance_rescale
    said = any("no_guidance_rescale" in vars(kind) for kind in type(family).__mro__ if kind is not ModelFamily)
    return "" if said or "no_guidance_rescale" in vars(family) else f"{family.name} cannot rescale guidance"


def _no_negative_prompt(config: Config, family: ModelFamily) -> str:
    if family.no_negative_prompt:
        return family.no_negative_prompt
    return "validation_guidance=1 disables guidance" if config[ValidationOptions].validation_guidance == 1 else ""


def batches(images: Sequence[PlannedImage], ranks: int, batch: int) -> list[list[list[int]]]:
    """The numbers of the images that each rank samples: batches[rank] is a list of batches of one size and strength.

    Every rank gets the same number of batches, because under a sharded model each forward pass is collective. Batches of the
    same size and strength have the same length; short ones are filled with their last image.
    """
    groups: dict[tuple[Bucket, float], list[int]] = {}
    for number, image in enumerate(images):
        groups.setdefault((image.size, image.prompt.adapter_strength), []).append(number)
    made: list[list[int]] = []
    for numbers in groups.values():
        rounds = -(-len(numbers) // (ranks * batch))
        length = -(-len(numbers) // (ranks * rounds))
        rows = [numbers[start : start + length] for start in range(0, len(numbers), length)]
        made += [row + row[-1:] * (length - len(row)) for row in rows]
    made += made[-1:] * (-len(made) % ranks)
    return [made[rank::ranks] for rank in range(ranks)]
