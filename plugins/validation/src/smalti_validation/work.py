"""The validation of a run: when it comes, and what of it is known before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from smalti import Config
from smalti.config import CheckpointOptions, TrainingOptions
from smalti.training import PeriodicWork, Run, attempt, is_due
from smalti_validation.base_model import sample_base_model
from smalti_validation.eval_mode import eval_mode
from smalti_validation.options import ValidationOptions
from smalti_validation.plan import check_validation, planned_images
from smalti_validation.prompts import validation_prompts
from smalti_validation.validation import sampling_request, validate

if TYPE_CHECKING:
    from smalti.data import DatasetSpec
    from smalti.models import ModelFamily


_LONG = 20
"""Seconds. SLURM and Kubernetes kill a run 30 seconds after they have asked it to stop, which it does after the images."""


class Validation(PeriodicWork):
    """Generates the images of all prompts at the interval of the options, on request and after the last step.

    Raises ConfigError with every problem of the prompt library, which it reads.
    """

    name = "validation"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options = config[ValidationOptions]
        self.prompts = validation_prompts(config)
        self.texts = [each.prompt for each in self.prompts]
        negative = (each.negative_prompt for each in self.prompts)
        self.negative_texts = list(dict.fromkeys(text for text in negative if text is not None))
        self.inputs = f"validation prompts {sha256(repr(self.prompts).encode()).hexdigest()[:8]}"
        self.base_images: Collection[str] = ()
        """The names of the images that the model before training made of the prompts, if they are there."""
        self._seconds: float | None = None
        """What the last images took."""

    def check(self, family: ModelFamily, datasets: Sequence[DatasetSpec]) -> list[str]:
        return check_validation(self.config, self.prompts, family)

    def start(self, run: Run) -> None:
        """Sample the base model, if that is asked for. A failure is reported and ends nothing."""
        if self.options.validation_base_model and run.state.step < run.state.max_steps:
            attempt(run, "sampling of the base model", self._sample_base_model)

    def _sample_base_model(self, run: Run) -> None:
        self.base_images = sample_base_model(run, self.prompts)

    def is_due(self, run: Run) -> bool:
        state = run.state
        return (
            state.validation_requested or is_due(state, self.options.validation_step_interval) or state.step == state.max_steps
        )

    def run(self, run: Run) -> None:
        self._save_before(run)
        begun = time.monotonic()
        validate(run, self.prompts, self.base_images)
        self._seconds = time.monotonic() - begun

    def _save_before(self, run: Run) -> None:
        """Save the step if its images take long, unless it is saved, or the run saves no intermediate steps. *Collective*."""
        saved = run.boundary.final or run.state.step in (run.saved_step, run.saver.pending_step)
        if saved or not run.config[CheckpointOptions].checkpoint_step_interval:
            return
        seconds = self._estimated_seconds(run) if self._seconds is None else self._seconds
        if run.parallel.all_reduce_max(math.ceil(seconds)) > _LONG:
            from smalti.training import save  # which a launcher that checks the run does not need

            save(run, last=False)

    def _estimated_seconds(self, run: Run) -> float:
        """Two forward passes of an inference step are taken to cost half of a forward and a backward pass of a micro-batch."""
        planned = planned_images(self.config, self.prompts, run.family.alignment)
        batches = math.ceil(len(planned) / (self.options.validation_batch_size * run.world.data_size))
        micro = (run.step_times.p95 or 0) / run.config[TrainingOptions].gradient_accumulation_steps
        return batches * self.options.validation_num_inference_steps * micro / 2

    def rehearsal(self, run: Run) -> Callable[[], object]:
        """One batch of the largest images, in one step."""
        planned = planned_images(self.config, self.prompts, run.family.alignment)
        largest = max(planned, key=lambda image: image.size.width * image.size.height)
        count = min(self.options.validation_batch_size, len(planned))
        request = replace(sampling_request(run, [largest] * count), steps=1)

        def sample() -> None:
            with eval_mode(run) as model, run.parallel.autocast():
                run.family.sample(model, request)

        return sample


def validation_of(config: Config) -> Validation | None:
    """The validation of a run; None without prompts."""
    return Validation(config) if config[ValidationOptions].samples_images else None
