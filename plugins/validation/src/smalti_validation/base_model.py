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

from smalti import UserError
from smalti.system import load_json
from smalti.training import Run, on_all_ranks
from smalti_validation.plan import PlannedImage, planned_images
from smalti_validation.png import image_settings
from smalti_validation.prompts import ValidationPrompt
from smalti_validation.validation import report, sample_images, settings_of

_log = logging.getLogger(__name__)
_OF_A_RUN = ("step", "config_digest", "run_id")
BEFORE = 0
"""The step of the images of the model before training."""


def sample_base_model(run: Run, prompts: Sequence[ValidationPrompt]) -> frozenset[str]:
    """Sample the base model, unless its images are there already. Returns the names of those to compare with. *Collective*.

    Raises AttemptFailed, on every rank.
    """
    planned = on_all_ranks(run.parallel, lambda: _without_adapter(run, prompts))
    folder = run.directory.samples_at(BEFORE)
    present = _present(run, planned, folder)
    if len(present) == len(planned):
        return present
    if run.adapter is None and run.state.step > 0:
        _missing(run, len(planned) - len(present))
        return present
    images = sample_images(run, planned, folder, BEFORE)
    report(run, images, folder, BEFORE)
    return frozenset(image.file for image in planned)


def _without_adapter(run: Run, prompts: Sequence[ValidationPrompt]) -> tuple[PlannedImage, ...]:
    """The images of a validation, without the adapter."""
    planned = planned_images(run.config, prompts, run.family.alignment)
    return tuple(replace(image, prompt=replace(image.prompt, adapter_strength=0.0)) for image in planned)


def _present(run: Run, planned: Sequence[PlannedImage], folder: Path) -> frozenset[str]:
    """The files that are there with the settings of this run, as the main rank sees them. *Collective*."""

    def look() -> str:
        return json.dumps([image.file for image in planned if _is_there(run, image, folder)]) if run.world.is_main else ""

    return frozenset(load_json(run.parallel.all_gather_text(on_all_ranks(run.parallel, look))[0]))


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
