"""Preservation: with another caption, an adapter is to change nothing.

The loss is |v(x_t, c) - target|^2 + m |v(x_t, c') - v0(x_t, c')|^2, where v is the model with its adapter, v0 the model without
it, c' the other caption, at the same noise and the same time. Both errors have the kind and the weights of the run's loss.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from smalti import Config, ConfigError, Problem
from smalti.config import RunOptions
from smalti.data import DatasetSpec, PreparedData
from smalti.diffusion import RandomColumn, SampleNoise
from smalti.models import ModelFamily
from smalti.parallel import to_device
from smalti.training import Step, Term, lacks_base
from smalti_objectives.masked_loss import as_column, weighted
from smalti_objectives.options import ObjectivesOptions

POLICY, BASE = "policy|caption=preserve", "base|caption=preserve"


class Preservation(Term):
    """The second half of that loss, for the images of the datasets to which it applies, in every n-th step."""

    name = "preserve"

    def __init__(self, config: Config, family: ModelFamily) -> None:
        self.options = config[ObjectivesOptions]
        self.weight = self.options.preserve_weight
        self.second_captions = {"preserve": self._caption}
        pairs = [each.rpartition("=") for each in self.options.preserve_class]
        self._classes = {trigger.strip(): word.strip() for trigger, _, word in pairs}
        """By trigger word; "" is any other one."""
        self._lacking = lacks_base(config, family)
        self._noise = SampleNoise(config[RunOptions].seed)

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        if self._lacking:
            message = f"preserve={self.options.preserve} trains towards the model without the adapter, and {self._lacking}"
            fix = "--model_type=lora, or leave preserve out"
            raise ConfigError([Problem(message=message, where="preserve", fix=fix, option="preserve")])
        trained = [spec for spec in datasets if spec.dataset_type == "image" and not spec.is_regularisation_data]
        lacking = [spec.id for spec in trained if not self._applies_to(spec)]
        if lacking and len(lacking) == len(trained):
            message = "preserve=class replaces the trigger word in captions, and no dataset has one"
            message += "" if "" in self._classes else " that preserve_class names"
            fix = 'give the datasets the key "trigger_word", or use --preserve=prompts or --preserve=blank'
            raise ConfigError([Problem(message=message, where="preserve", fix=fix, option="preserve")])
        why = "it has no trigger_word" if "" in self._classes else "it has no trigger_word that preserve_class names"
        return [f"preserve=class has no effect on the dataset {name}: {why}" for name in lacking]

    def texts(self, data: PreparedData) -> Iterator[str]:
        if self.options.preserve != "class":
            yield from self._prompts
            return
        seen: set[str] = set()
        for dataset in data.datasets:
            for row in range(len(dataset.index) if self._applies_to(dataset.spec) else 0):
                found = {self._renamed(text, dataset.spec) for text in dataset.texts(row)} - seen
                seen |= found
                yield from sorted(found)

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        due = (position + 1) % self.options.preserve_every == 0
        return (POLICY, BASE) if due and any(map(self._applies_to, datasets)) else ()

    def loss(self, step: Step) -> Tensor | None:
        if BASE not in step.predictions:
            return None
        errors = step.errors(POLICY, against=BASE)
        chosen = torch.tensor([self._applies_to(spec) for spec in step.batch.datasets])
        return step.mean(weighted(step, errors * as_column(to_device(chosen, errors.device), errors)))

    def _applies_to(self, spec: DatasetSpec) -> bool:
        """Regularisation data are held to the same model anyway."""
        if spec.is_regularisation_data or self.options.preserve != "class":
            return not spec.is_regularisation_data
        return bool(spec.trigger_word) and self._class_of(spec) is not None

    def _class_of(self, spec: DatasetSpec) -> str | None:
        return self._classes.get(str(spec.trigger_word), self._classes.get(""))

    def _caption(self, caption: str, spec: DatasetSpec, number: int) -> str:
        if self.options.preserve == "class":
            return self._renamed(caption, spec)
        chance = self._noise.column([number], RandomColumn.SECOND_CAPTION).item()
        return self._prompts[int(chance * len(self._prompts))]

    @property
    def _prompts(self) -> tuple[str, ...]:
        return tuple(self.options.preserve_prompts) if self.options.preserve == "prompts" else ("",)

    def _renamed(self, caption: str, spec: DatasetSpec) -> str:
        """A caption with the class in place of the trigger word, wherever that is a word of its own."""
        if not spec.trigger_word or (name := self._class_of(spec)) is None:
            return caption
        # A boundary between ASCII characters only: some languages write words without spaces.
        word = rf"(?<!\w){re.escape(spec.trigger_word)}(?!\w)"
        return re.sub(word, lambda _: name, caption, flags=re.ASCII)
