"""The images that an event of a run names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

FOLDER = "samples"
"""That of the images in a run directory."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image. `file` is its path relative to the folder `samples` of the run."""

    step: int
    prompt: str
    seed: int | None
    file: str


def images_of(images: object, step: int) -> Iterator[Sample]:
    """Those of the field `images` of a "sample" event that are in the run's own folder. Anything else in it is left out."""
    for image in images if isinstance(images, list) else ():
        if not isinstance(image, dict) or not isinstance(path := image.get("path"), str):
            continue
        parts = PurePosixPath(path).parts
        if len(parts) < 2 or parts[0] != FOLDER or ".." in parts:
            continue
        prompt, seed = image.get("prompt"), image.get("seed")
        yield Sample(
            step=step,
            prompt=prompt if isinstance(prompt, str) else "",
            seed=seed if isinstance(seed, int) else None,
            file="/".join(parts[1:]),
        )
