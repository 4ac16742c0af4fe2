"""The options of the objectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from smalti import Config, OptionGroup, Options, Problem, Texts, option


class ObjectivesOptions(Options):
    preserve: Literal["class", "blank", "prompts"] | None = option(
        None,
        help="Hold an adapter to the model without it for another caption of each image. `class`: its caption with"
        " `preserve_class` in place of the trigger word. `blank`: the empty prompt. `prompts`: one of `preserve_prompts`.",
        tradeoff="other prompts stay as they were; a step takes about 2.6 times as long",
    )
    preserve_weight: float = option(
        1.0, help="Weight of the loss that `preserve` adds.", level="advanced", when="preserve", ge=0
    )
    preserve_class: str | None = option(
        None, help="The word for what the trigger word is one of, such as cat.", when="preserve == class"
    )
    preserve_prompts: Texts = option(
        (),
        help="A prompt whose images are to stay as they are. Repeat the flag for several; each visit of an image takes one.",
        when="preserve == prompts",
    )
    preserve_every: int = option(
        1, help="Preserve in every n-th step only, at 1/n of the cost.", level="advanced", when="preserve", ge=1
    )
    timestep_min: float = option(
        0.0,
        help="Train no noise level below this one: 0 is the image, 1 is noise. The distribution keeps its shape above it.",
        level="advanced",
        ge=0,
        lt=1,
    )
    timestep_max: float = option(1.0, help="Train no noise level above this one.", level="advanced", gt=0, le=1)


GROUP = OptionGroup(name="objectives", title="Objectives", options=ObjectivesOptions)


def problems(config: Config) -> list[Problem]:
    """What is wrong with the values of these options together."""
    return config.run_checks(_preservation, _range)


def _preservation(config: Config) -> Iterator[Problem]:
    options = config[ObjectivesOptions]
    if options.preserve == "class" and not options.preserve_class:
        message = "preserve=class needs the class of what is trained"
        yield Problem(message=message, where="preserve", fix="--preserve_class=WORD, such as cat", option="preserve_class")
    if options.preserve == "prompts" and not options.preserve_prompts:
        message = "preserve=prompts needs prompts"
        yield Problem(
            message=message, where="preserve", fix='--preserve_prompts="a photo of a street"', option="preserve_prompts"
        )


def _range(config: Config) -> Iterator[Problem]:
    low, high = config[ObjectivesOptions].timestep_min, config[ObjectivesOptions].timestep_max
    if low >= high:
        message = f"there are no noise levels from timestep_min={low:g} to timestep_max={high:g}"
        yield Problem(message=message, where="timestep_min", fix="a smaller timestep_min", option="timestep_min")
