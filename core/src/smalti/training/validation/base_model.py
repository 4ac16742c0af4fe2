"""Images of the model before training, to which those of a validation are compared. They are sampled once in a run.

Their folder is that of a validation of step 0. A run with an adapter can sample them at any step, without the adapter; other
runs only before their first step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.config import ValidationOptions
from smalti.errors import UserError
from smalti.rundir import image_settings
from smalti.training.failures.attempts import attempt, on_all_ranks
from smalti.training.validation.plan import PlannedImage, planned_images
from smalti.training.validation.validation import report, sample_images, settings_of

if TYPE_CHECKING:
    from smalti.training.run import Run

_log = logging.getLogger(__name__)
_OF_A_RUN = ("step", "config_digest", "run_id")
BEFORE = 0
"""The step of the images of the model before training."""


def compare_with_base_model(run: Run) -> None:
    """Sample the base model, unless its images are there already. *Collective*. A failure is reported and ends nothing.

    Afterwards `run.base_images` has those to compare with.
    """
    options = run.config[ValidationOptions]
    if options.validation_base_model and options.samples_images and run.state.step < run.state.max_steps:
        attempt(run, "sampling of the base model", _complete)


def _complete(run: Run) -> None:
    """Raises AttemptFailed, on every rank."""
    planned = on_all_ranks(run.parallel, lambda: base_images(run))
    folder = run.directory.samples_at(BEFORE)
    present = _present(run, planned, folder)
    if len(present) < len(planned):
        if run.adapter is None and run.state.step > 0:
            _missing(run, len(planned) - len(present))
        else:
            images = sample_images(run, planned, folder, BEFORE)
            report(run, images, folder, BEFORE)
            present = frozenset(image.file for image in planned)
    run.base_images = present


def base_images(run: Run) -> tuple[PlannedImage, ...]:
    """The images of a validation, without the adapter."""
    planned = planned_images(run.config, run.prompts, run.family.alignment)
    return tuple(replace(image, prompt=replace(image.prompt, adapter_strength=0.0)) for image in planned)


def _present(run: Run, planned: Sequence[PlannedImage], folder: Path) -> frozenset[str]:
    """The files that are there with the settings of this run, as the main rank sees them. *Collective*."""

    def look() -> str:
        return json.dumps([image.file for image in planned if _is_there(run, image, folder)]) if run.world.is_main else ""

    return frozenset(json.loads(run.parallel.all_gather_text(on_all_ranks(run.parallel, look))[0]))


def _is_there(run: Run, image: PlannedImage, folder: Path) -> bool:
    path = folder / image.file
    if not path.is_file():
        return False
    try:
        found = image_settings(path)
    except UserError:
        return False
    wanted = {name: str(value) for name, value in settings_of(run, image).items()}
    return {name: value for name, value in found.items() if name not in _OF_A_RUN} == wanted


def _missing(run: Run, count: int) -> None:
    if run.world.is_main:
        _log.warning(
            "%d images of the base model are not compared: after step 0 of full training its weights are gone, and "
            "samples/%08d does not have the images with the present settings",
            count,
            BEFORE,
        )
