"""Sliders: adapters that change something one way at a positive strength, and the other way at a negative one.

Prompts say what, or pairs of images show it. Both signs are trained in each step, over the same noise at the same time, so what
they have in common is not learned. With the strength s, 1 or -1, the loss is

- for prompts |v_s(x_t, c) - target|^2, with target = v0(x_t, c) + s g (v0(x_t, c+) - v0(x_t, c-)), brought to the mean and the
  deviation of v0(x_t, c) by `slider_rescale`, as in ai-toolkit (Gandikota et al. 2023, "Concept Sliders", without);
- for images |v_s(x_t, c) - target(x, e)|^2, where x is the image for s = 1, and its counterpart for s = -1.

Here v_s is the model with its adapter at the strength s, v0 the model without it, c the caption of the image.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from smalti import Config, ConfigError, Problem
from smalti.data import DatasetSpec, PreparedData
from smalti.models import ModelFamily
from smalti.training import SecondCaption, Step, Term, Turn, lacks_base
from smalti_objectives.columns.images import check_encoder
from smalti_objectives.options import ObjectivesOptions

COUNTERPART = "slider_counterpart"
"""The column of the images for negative strengths."""
MORE, LESS = "slider_positive", "slider_negative"
"""The second captions c+ and c-."""


def slider(config: Config, family: ModelFamily) -> list[Term]:
    """The term that `slider` asks for, if any."""
    kind = config[ObjectivesOptions].slider
    return [] if kind is None else [PromptSlider(config, family) if kind == "prompts" else ImageSlider(config, family)]


class _Slider(Term):
    """What both kinds need: an adapter that works at negative strengths."""

    name = "slider"
    turns: Sequence[Turn] = (Turn(), Turn(strength=-1))

    def __init__(self, config: Config, family: ModelFamily) -> None:
        self.options = config[ObjectivesOptions]
        self._kind = config.values().get("lora_kind")
        self._lacking = lacks_base(config, family)
        self._no_encoder = check_encoder(config, family)

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        if self._lacking:
            message = f"a slider is an adapter that is trained at the strengths 1 and -1, and {self._lacking}"
            fix = "--model_type=lora with another model family, or leave slider out"
            raise ConfigError([Problem(message=message, where="slider", fix=fix, option="slider")])
        if self._kind == "dora":
            message = "a slider is used at negative strengths, which dora has not: it brings weights to another length"
            raise ConfigError([Problem(message=message, where="lora_kind", fix="--lora_kind=lora", option="lora_kind")])
        return ()


class PromptSlider(_Slider):
    """Trains the direction from one prompt to another, as the model has it."""

    def __init__(self, config: Config, family: ModelFamily) -> None:
        super().__init__(config, family)
        positive, negative = str(self.options.slider_positive), str(self.options.slider_negative or "")
        self._prompts = positive, negative
        self.second_captions: Mapping[str, SecondCaption] = MappingProxyType(
            {MORE: lambda *visit: positive, LESS: lambda *visit: negative}
        )

    def texts(self, data: PreparedData) -> Iterator[str]:
        yield from self._prompts

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        return "base", f"base|caption={MORE}", f"base|caption={LESS}"

    def target(self, step: Step, target: Tensor) -> Tensor:
        neutral, more, less = (step.predictions[name].float() for name in self.passes(0, ()))
        found = neutral + step.turn.strength * self.options.slider_guidance * (more - less)
        return _like(found, neutral) if self.options.slider_rescale else found


class ImageSlider(_Slider):
    """Trains each image at the strength 1, and its counterpart at -1."""

    turns = (Turn(), Turn(strength=-1, latents=COUNTERPART))

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        super().check(datasets)
        trained = [spec for spec in datasets if spec.dataset_type == "image"]
        lacking = [spec.id for spec in trained if COUNTERPART not in spec.columns]
        fix = f'give the dataset the key "{COUNTERPART}_path"'
        if lacking:
            message = "slider=images trains pairs of images, and this dataset has no counterparts"
            raise ConfigError([Problem(message=message, where=f"dataset {name!r}", fix=fix) for name in lacking])
        if self._no_encoder is not None:
            raise ConfigError([self._no_encoder])
        return ()


def _like(values: Tensor, other: Tensor) -> Tensor:
    """The values, with the mean and the standard deviation that the other ones have, sample by sample."""
    dims = tuple(range(1, values.ndim))
    deviation, mean = values.std(dims, keepdim=True), values.mean(dims, keepdim=True)
    like = other.std(dims, keepdim=True), other.mean(dims, keepdim=True)
    return (values - mean) / deviation.clamp(min=1e-8) * like[0] + like[1]
