"""`--report_to`: TensorBoard, Trackio, W&B and others, through Accelerate's trackers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from smalti import (
    Outcome,
    Problem,
    RunInfo,
    RunState,
    ValidationImage,
    ValidationResult,
    hookimpl,
)

if TYPE_CHECKING:
    import numpy as np
    from accelerate.tracking import GeneralTracker

    from smalti import Config, OptionGroup

_IMAGES: dict[str, dict[str, str]] = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}, "swanlab": {}}
"""Trackers that get validation images, with the arguments that their method takes. Others want images in forms of their own."""
_PACKAGES = {"comet_ml": "comet-ml"}


class Trackers:
    """One tracker per name, on the main rank only."""

    def __init__(self) -> None:
        self._trackers: list[GeneralTracker] = []

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_plots.tracker_options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from difflib import get_close_matches

        from smalti_plots.tracker_options import ALL, KNOWN, TrackerOptions

        problems = []
        for name in config[TrackerOptions].report_to:
            if name == ALL:
                continue
            if name not in KNOWN:
                near = get_close_matches(name, KNOWN, n=2)
                fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(KNOWN)}, {ALL}"
                problems.append(Problem(message=f"unknown tracker {name!r}", where="report_to", fix=fix))
            elif find_spec(name) is None:
                package = _PACKAGES.get(name, name)
                problems.append(Problem(message=f"{name} is not installed", where="report_to", fix=f"pip install {package}"))
        return problems

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        from smalti_plots.tracker_options import TrackerOptions, tracker_names

        options = info.config[TrackerOptions]
        if not info.world.is_main or not options.report_to:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for name in tracker_names(options):
            kind = LOGGER_TYPE_TO_CLASS["comet_ml" if name == "comet" else name]
            settings = {"logging_dir": info.directory / "trackers"} if kind.requires_logging_directory else {}
            # Trackers with a logging directory use the project as a folder name.
            project = info.config.shown("tracker_project_name") if settings else options.tracker_project_name
            tracker = kind(str(project), **settings)
            tracker.start()
            tracker.store_init_configuration(_flat(info.config.values()))
            self._trackers.append(tracker)

    @hookimpl
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step)

    @hookimpl
    def on_validation(self, result: ValidationResult) -> None:
        shown = [tracker for tracker in self._trackers if tracker.name in _IMAGES]
        images = {f"validation/{image.path.stem}": _pixels(image) for image in result.images} if shown else {}
        for tracker in shown:
            tracker.log_images(images, step=result.step, **_IMAGES[tracker.name])

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()


def _pixels(image: ValidationImage) -> np.ndarray:
    """(1, height, width, 3), 8 bits; with 2 in place of 1, first that of the model before training."""
    import numpy as np
    from PIL import Image

    return np.stack([np.asarray(Image.open(path)) for path in (image.base, image.path) if path is not None])


def _flat(values: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """Numbers and text unchanged, everything else as text: every tracker accepts these."""
    return {name: value if isinstance(value, str | int | float | bool) else str(value) for name, value in values.items()}


plugin = Trackers()
