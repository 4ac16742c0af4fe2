"""The options of the objectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from smalti import Config, OptionGroup, Options, Problem, Texts, option


class ObjectivesOptions(Options):
    preserve: Literal["class", "blank", "prompts"] | None = option(
        None,
        help="Hold the adapted model to the one without the adapter, for another caption of each image. `class` means its own"
        " with `preserve_class` for the trigger word, `prompts` one of `preserve_prompts`.",
        tradeoff="other prompts stay as they were; a step takes about 2.6 times as long",
    )
    preserve_weight: float = option(
        1.0, help="Weight of the loss that `preserve` adds.", level="advanced", when="preserve", ge=0
    )
    preserve_class: Texts = option(
        (),
        help="The word for what the trigger word is one of, such as cat. For datasets with several trigger words, repeat the"
        " flag with zwx=cat for each.",
        when="preserve == class",
    )
    preserve_prompts: Texts = option(
        (),
        help="A prompt whose images are to stay as they are. Repeat the flag for several; each visit of an image takes one.",
        when="preserve == prompts",
    )
    preserve_every: int = option(
        1, help="Preserve in every n-th step only, at 1/n of the cost.", level="advanced", when="preserve", ge=1
    )
    slider: Literal["prompts", "images"] | None = option(
        None,
        help="Train an adapter for both directions, by two prompts or by pairs of images (`slider_counterpart_path`)."
        " At the strength -1 it does the opposite of what it does at 1.",
        tradeoff="a step takes twice as long with images, three times with prompts",
    )
    slider_positive: str | None = option(
        None, help="What there is to be more of at positive strengths, such as `a very old person`.", when="slider == prompts"
    )
    slider_negative: str | None = option(
        None, help="What there is to be more of at negative strengths. Default: the empty prompt.", when="slider == prompts"
    )
    slider_guidance: float = option(
        3.0,
        help="How far the strength 1 goes, in differences between the predictions for both prompts.",
        level="advanced",
        when="slider == prompts",
        gt=0,
    )
    slider_rescale: bool = option(
        True,
        help="Give the target of a prompt slider mean and deviation of the prediction without adapter, as in ai-toolkit.",
        level="advanced",
        when="slider == prompts",
    )
    dpo_beta: float | None = option(
        None,
        help="Learn to prefer images to those in the `rejected_path` of their dataset (Diffusion-DPO, Flow-DPO)."
        " The larger, the closer the adapter stays to the base; 2000 to 5000 is usual.",
        tradeoff="a step takes about 2.7 times as long",
        gt=0,
    )
    timestep_min: float = option(
        0.0,
        help="Train no noise level below this one: 0 is the image, 1 is noise. The distribution keeps its shape above it.",
        level="advanced",
        ge=0,
        lt=1,
    )
    timestep_max: float = option(
        1.0, help="Train no noise level above this one. Evaluations measure levels of the range.", level="advanced", gt=0, le=1
    )


GROUP = OptionGroup(name="objectives", title="Objectives", options=ObjectivesOptions)


def problems(config: Config) -> list[Problem]:
    """What is wrong with the values of these options together."""
    return config.run_checks(_preservation, _slider, _range)


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


def _slider(config: Config) -> Iterator[Problem]:
    options = config[ObjectivesOptions]
    if options.slider == "prompts" and not options.slider_positive:
        message, fix = "slider=prompts needs the prompt of positive strengths", '--slider_positive="a very old person"'
        yield Problem(message=message, where="slider", fix=fix, option="slider_positive")
    if options.slider is not None and options.dpo_beta is not None:
        message = "a slider and preferences are trained with different targets"
        yield Problem(message=message, where="slider", fix="leave out slider or dpo_beta", option="slider")
    if options.slider is not None and config.values().get("release_gradients"):
        message = "a slider adds up the gradients of both strengths, and release_gradients leaves none to add to"
        yield Problem(message=message, where="slider", fix="--no_release_gradients", option="release_gradients")


def _range(config: Config) -> Iterator[Problem]:
    low, high = config[ObjectivesOptions].timestep_min, config[ObjectivesOptions].timestep_max
    if low >= high:
        message = f"there are no noise levels from timestep_min={low:g} to timestep_max={high:g}"
        yield Problem(message=message, where="timestep_min", fix="a smaller timestep_min", option="timestep_min")
