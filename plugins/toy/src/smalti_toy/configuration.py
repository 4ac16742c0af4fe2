"""The options of the toy family, what is wrong with them, and the family that they describe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import Config, OptionGroup, Options, Problem, option
from smalti.config import ModelOptions, ObjectiveOptions

if TYPE_CHECKING:
    from smalti_toy.family import ToyFamily


class ToyOptions(Options):
    toy_width: int = option(192, help="Width of the tokens, a multiple of 4.", level="advanced", ge=8, le=16_384)
    toy_depth: int = option(6, help="Number of blocks.", level="advanced", ge=1, le=1_000)
    toy_heads: int = option(6, help="Number of attention heads, a divisor of the width.", level="advanced", ge=1)
    toy_patch: int = option(4, help="Patch size in pixels. Image sizes are multiples of it.", level="advanced", ge=1, le=1_024)
    toy_sample_shift: float = option(
        1.0, help="Timestep shift of validation images; above 1 spends more steps near noise.", level="advanced", gt=0
    )


GROUP = OptionGroup(name="toy", title="Toy family", options=ToyOptions)


def create(config: Config) -> ToyFamily:
    from smalti_toy.family import ToyFamily, ToyShape

    options = config[ToyOptions]
    shape = ToyShape(width=options.toy_width, depth=options.toy_depth, heads=options.toy_heads, patch=options.toy_patch)
    start = config[ModelOptions].pretrained_model_name_or_path
    return ToyFamily(
        shape,
        prediction=config[ObjectiveOptions].prediction_type or "sample",
        sample_shift=options.toy_sample_shift,
        start=None if start is None else Path(start),
    )


def problems(config: Config) -> list[Problem]:
    """What is wrong with the configuration, if the toy family is to be trained."""
    return config.run_checks(_adapter, _weights, _shape) if _is_toy(config) else []


def _is_toy(config: Config) -> bool:
    name = config[ModelOptions].model_family
    return name is not None and name.lower().replace("-", "_") == "toy"


def _adapter(config: Config) -> Iterator[Problem]:
    if config[ModelOptions].model_type == "lora":
        message = "the model family toy does not support LoRA"
        yield Problem(message=message, where="model_type", fix="--model_type=full", option="model_type")


def _weights(config: Config) -> Iterator[Problem]:
    start = config[ModelOptions].pretrained_model_name_or_path
    if start is not None and not Path(start).exists():
        where, fix = "pretrained_model_name_or_path", "a folder or file of safetensors; leave it out for random weights"
        yield Problem(message=f"there is no {start}", where=where, fix=fix)


def _shape(config: Config) -> Iterator[Problem]:
    width, heads = config[ToyOptions].toy_width, config[ToyOptions].toy_heads
    if width % heads:
        nearest = min((each for each in range(1, width + 1) if not width % each), key=lambda each: abs(each - heads))
        message = f"toy_heads={heads} does not divide toy_width={width}"
        yield Problem(message=message, where="toy_heads", fix=f"--toy_heads={nearest}", option="toy_heads")
    if width % 4:
        message = f"toy_width={width} is not a multiple of 4"
        yield Problem(message=message, where="toy_width", fix=f"--toy_width={width - width % 4 + 4}", option="toy_width")
