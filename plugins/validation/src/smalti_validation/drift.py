"""How far the model has moved from the one before training, measured on images of the same prompts and seeds. Needs no weights.

On prompts without the subject that is trained, little drift is wanted: what changes there is what the model forgets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from smalti import ValidationImage
from smalti.system import load_json
from smalti.training import Run, log_metrics, on_all_ranks

_WINDOW = 11
"""Pixels across the Gaussian window of the structural similarity; less where an image is smaller."""
_SIGMA = 1.5
_STABLE = (0.01**2, 0.03**2)


def report_drift(run: Run, images: Sequence[ValidationImage], step: int) -> None:
    """Report the mean drift of the images that have a `base` to trackers, as `drift/mse` and `drift/ssim`. *Collective*.

    Ranks share the images. On nodes without a shared file system, those count that the rank sees. Raises AttemptFailed, on
    every rank.
    """
    compared = [(image.path, image.base) for image in images if image.base is not None]

    def measure() -> str:
        mine = compared[run.world.rank :: run.world.size]
        return json.dumps([drift(pixels(new), pixels(old)) for new, old in mine if new.is_file() and old.is_file()])

    if not compared:
        return
    text = on_all_ranks(run.parallel, measure)
    found = [values for each in run.parallel.all_gather_text(text) for values in load_json(each)]
    if found:
        error, similarity = np.mean(found, axis=0).tolist()
        log_metrics(run.plugins, run.world, {"drift/mse": error, "drift/ssim": similarity}, step)


def pixels(path: Path) -> Tensor:
    """An image as (3, H, W), fp64 from 0 to 1."""
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).double() / 255


def drift(image: Tensor, base: Tensor) -> tuple[float, float]:
    """Mean squared error and mean structural similarity of two images (3, H, W) from 0 to 1."""
    return float((image - base).square().mean()), structural_similarity(image, base)


def structural_similarity(one: Tensor, other: Tensor) -> float:
    """SSIM (Wang et al. 2004): the mean over channels and all places of a Gaussian window inside the image. 1 for the same."""
    size = min(_WINDOW, (min(one.shape[1:]) - 1) // 2 * 2 + 1)
    line = torch.exp(-((torch.arange(size, dtype=one.dtype) - size // 2) ** 2) / (2 * _SIGMA**2))
    line /= line.sum()

    def smooth(values: Tensor) -> Tensor:
        return conv2d(conv2d(values[:, None], line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))

    mean, other_mean = smooth(one), smooth(other)
    variance, other_variance = smooth(one * one) - mean**2, smooth(other * other) - other_mean**2
    covariance = smooth(one * other) - mean * other_mean
    first, second = _STABLE
    similarity = (2 * mean * other_mean + first) * (2 * covariance + second)
    return float((similarity / ((mean**2 + other_mean**2 + first) * (variance + other_variance + second))).mean())
