"""Text encoders that are adapted with the model: how their layers are named, and the weights of all of them as one.

The layers of an encoder have the names that they have in files: those of the encoder's own file, after the part's name, such as
`text_encoder.text_model.encoder.layers.0.self_attn.q_proj`. Newer versions of transformers leave `text_model` out in some
classes, in files that they write too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

from torch import Tensor

from smalti import UserError
from smalti.checkpoint import StoredTensor
from smalti.config import Config, OptimizerOptions
from smalti.models import SeededWeights
from smalti_diffusers.options import LoraOptions
from smalti_diffusers.sources.components import PartWeights

KOHYA = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
"""The text encoders of SDXL -> how the names of their layers begin in kohya's format."""
KOHYA_ONE = "lora_te"
"""The same of the encoder of a model that has one."""
CLIP = "text_model."
TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Layers of an encoder that get an adapter, as in the scripts of diffusers."""


def encoder_of(layer: str) -> str | None:
    """The text encoder that has a layer; None for the model itself."""
    part = layer.partition(".")[0]
    return part if part in KOHYA else None


def trained_encoders(config: Config | None, adaptable: tuple[str, ...], family: str) -> tuple[str, ...]:
    """The text encoders that a run trains. Raises UserError if it is to, and a family has none that are `adaptable`."""
    if config is None or not config[LoraOptions].train_text_encoder:
        return ()
    if not adaptable:
        raise UserError(f"the text encoders of {family} cannot be trained", fix="leave --train_text_encoder out")
    return adaptable


def stops_encoders(config: Config | None) -> bool:
    """Whether the text encoders that a run trains may stop learning before it ends."""
    options = config[LoraOptions] if config is not None else LoraOptions()
    return options.train_text_encoder_steps is not None or options.train_text_encoder_frac is not None


class EncoderRates:
    """The learning rates of the adapters of text encoders, by that of the run."""

    def __init__(self, config: Config | None) -> None:
        self._ratios: dict[str, float] = {}
        self._stop = stops_encoders(config)
        if config is not None:
            first, second = config[LoraOptions].text_encoder_lr, config[LoraOptions].text_encoder_2_lr
            rates = zip(KOHYA, (first, first if second is None else second), strict=True)
            self._ratios = {part: rate / config[OptimizerOptions].learning_rate for part, rate in rates if rate is not None}

    def scaled(self, name: str, ratio: float) -> float:
        """The ratio of a trained parameter to the rate of the run, of which `ratio` is known; of the model's own that one.

        Encoders that may stop get the next larger number, which no other parameter has: the optimizer makes groups by ratio.
        """
        if (part := encoder_of(name)) is None:
            return ratio
        ratio *= self._ratios.get(part, 1.0)
        return math.nextafter(ratio, math.inf) if self._stop else ratio


def spellings(layer: str) -> list[str]:
    """Every name that a layer of an encoder can have in a file; the first is that of diffusers."""
    part, _, own = layer.partition(".")
    alone = [kohya_name(layer, alone=True)] if part == "text_encoder" else []
    return [layer, f"{part}.{own.removeprefix(CLIP)}", kohya_name(layer), *alone]


def kohya_name(layer: str, *, alone: bool = False) -> str:
    """The name in kohya's format, of the encoder of a model that has one if it is `alone`."""
    part, _, own = layer.partition(".")
    return f"{KOHYA_ONE if alone else KOHYA[part]}_{own.replace('.', '_')}"


class JoinedWeights:
    """Weights of a model that holds its text encoders: the model's own, and each encoder's under the name of its part.

    An encoder that is not among `encoders` has its weights in `model`.
    """

    def __init__(self, model: SeededWeights | PartWeights, encoders: Mapping[str, PartWeights]) -> None:
        self._model = model
        self._encoders = encoders
        self._stored = {part: frozenset(weights.names()) for part, weights in encoders.items()}

    def names(self) -> Iterator[str]:
        yield from (name for name in self._model.names() if name.partition(".")[0] not in self._encoders)
        for part, stored in self._stored.items():
            yield from (f"{part}.{name}" for name in _whole_names(stored))

    def get(self, name: str) -> Tensor:
        weights, own = self.place(name)
        return weights.get(own)

    def stored(self, name: str) -> StoredTensor:
        """Raises AttributeError of a tensor that comes from a seed."""
        weights, own = self.place(name)
        return weights.stored(own)  # type: ignore[union-attr]

    def digest(self) -> str:
        """Tells these weights from others."""
        parts = [self._model.digest(), *(f"{part} {weights.digest()}" for part, weights in sorted(self._encoders.items()))]
        return sha256(" ".join(parts).encode()).hexdigest()

    def place(self, name: str) -> tuple[SeededWeights | PartWeights, str]:
        """Where a tensor is, and what it is called there."""
        part, _, own = name.partition(".")
        if part not in self._encoders:
            return self._model, name
        return self._encoders[part], own if own in self._stored[part] else own.removeprefix(CLIP)


BaseWeights = SeededWeights | PartWeights | JoinedWeights
"""The first weights of a model without an adapter."""


def _whole_names(stored: Iterable[str]) -> Iterator[str]:
    """The names in the file of an encoder, with the part that newer versions of transformers leave out."""
    for name in stored:
        yield name if name.startswith((CLIP, "text_projection.")) else CLIP + name
