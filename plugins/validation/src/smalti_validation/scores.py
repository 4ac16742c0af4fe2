"""Scores of validation images by CLIP and DINO models in folders: how well images fit their prompts and the training images.

    clip/score       100 x the mean cosine of an image and its prompt, negative ones as 0 (Hessel et al. 2021)
    clip/mmd         1000 x the squared maximum mean discrepancy to the training images (Jayasumana et al. 2024: CMMD)
    dino/nearest     the mean cosine of an image to the training image that is nearest
    dino/largest     the largest such cosine: near 1, a training image was memorised

Shapes: I validation images, R training images, D features, which have the length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from smalti import Config, ConfigError, Problem, UserError
from smalti.data import BadSampleError, fixed_crop
from smalti.system import load_json, read_regular
from smalti.training import PeriodicWork, Run, log_metrics, on_all_ranks
from smalti_validation.options import ValidationOptions
from smalti_validation.plan import planned_images
from smalti_validation.work import Validation

if TYPE_CHECKING:
    from PIL.Image import Image

    from smalti.data import DatasetSpec
    from smalti.models import ModelFamily

_BATCH = 16
_WIDTH = 10.0
"""Of the Gaussian kernel of CMMD."""


class Scores(PeriodicWork):
    """Scores the images of each validation, on the main rank. The models are in the memory of the device meanwhile only."""

    name = "scores"

    def __init__(self, options: ValidationOptions) -> None:
        self.options = options
        self._references: dict[Path, Tensor] = {}
        """Features of the training images (R, D), by the folder of the model."""

    def check(self, family: ModelFamily, datasets: Sequence[DatasetSpec]) -> list[str]:
        problems = [*_problems("clip_weights", self.options.clip_weights, "clip")]
        problems += _problems("dino_weights", self.options.dino_weights, "dinov2")
        if problems:
            raise ConfigError(problems)
        return (
            []
            if self.options.samples_images
            else ["clip_weights and dino_weights without effect: there is no validation prompt"]
        )

    def is_due(self, run: Run) -> bool:
        return any(isinstance(work, Validation) and work.is_due(run) for work in run.periodic)

    def run(self, run: Run) -> None:
        validation = next(work for work in run.periodic if isinstance(work, Validation))
        planned = planned_images(run.config, validation.prompts, run.family.alignment)
        folder = run.directory.samples_at(run.state.step)

        def score() -> dict[str, float]:
            if not run.world.is_main:
                return {}
            images = [_opened(folder / image.file) for image in planned]
            return self._scores(run, images, [image.prompt.prompt for image in planned])

        log_metrics(run.plugins, run.world, on_all_ranks(run.parallel, score), run.state.step)

    @torch.no_grad()
    def _scores(self, run: Run, images: Sequence[Image], prompts: Sequence[str]) -> dict[str, float]:
        scores: dict[str, float] = {}
        if (folder := self.options.clip_weights) is not None:
            clip = Clip(folder, run.world.device)
            features = clip.images(images)
            scores["clip/score"] = clip_score(features, clip.texts(prompts))
            references = self._of_training(folder, run, clip.images)
            if min(len(features), len(references)) > 1:
                scores["clip/mmd"] = discrepancy(features, references)
        if (folder := self.options.dino_weights) is not None:
            dino = Dino(folder, run.world.device)
            nearest = (dino.images(images) @ self._of_training(folder, run, dino.images).T).max(dim=1).values
            scores |= {"dino/nearest": float(nearest.mean()), "dino/largest": float(nearest.max())}
        return scores

    def _of_training(self, folder: Path, run: Run, features: Callable[[Sequence[Image]], Tensor]) -> Tensor:
        """Features of training images (R, D), computed once in a launch."""
        if folder not in self._references:
            images = list(_training_images(run, self.options.score_images))
            if not images:
                raise UserError("no training image can be read to compare with", fix="repair the images that are listed")
            self._references[folder] = features(images)
        return self._references[folder]


class Vision:
    """A model of transformers with the processor of its images, from a folder, on a device."""

    def __init__(self, folder: Path, device: str) -> None:
        import transformers

        library: Any = transformers  # of which some functions have no types
        library.utils.logging.disable_progress_bar()
        self.device = device
        self.folder = folder
        model: Any = library.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.model = model.to(device).eval()
        self._processor: Any = library.AutoImageProcessor.from_pretrained(folder, local_files_only=True)

    def images(self, images: Sequence[Image]) -> Tensor:
        """Features (I, D) in host memory."""
        made = []
        for first in range(0, len(images), _BATCH):
            inputs = self._processor(images=list(images[first : first + _BATCH]), return_tensors="pt")
            made.append(self.features(inputs["pixel_values"].to(self.device)))
        return _normal(torch.cat(made))

    def features(self, pixels: Tensor) -> Tensor:
        """Features of prepared images (I, 3, H, W)."""
        raise NotImplementedError


class Clip(Vision):
    """Images and texts in one space."""

    def features(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features (I, D) in host memory; a text ends where the model's context does."""
        from transformers.models.auto import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        most = self.model.config.text_config.max_position_embeddings
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt").to(self.device)
        found = self.model.text_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return _normal(self.model.text_projection(found.pooler_output))


class Dino(Vision):
    """What images show, apart from texts."""

    def features(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.model(pixel_values=pixels).pooler_output)


def clip_score(images: Tensor, texts: Tensor) -> float:
    """100 x the mean cosine of images and texts (I, D), negative ones as 0."""
    return 100 * float((images * texts).sum(dim=1).clamp(min=0).mean())


def discrepancy(one: Tensor, other: Tensor) -> float:
    """1000 x the squared maximum mean discrepancy of two sets (I, D) and (R, D), without bias, so it may be negative."""
    one, other = one.double(), other.double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * _WIDTH**2))

    def within(values: Tensor) -> Tensor:
        count = len(values)
        return (kernel(values, values).sum() - count) / (count * (count - 1))

    return 1000 * float(within(one) + within(other) - 2 * kernel(one, other).mean())


def _normal(features: Tensor) -> Tensor:
    return nn.functional.normalize(features.float(), dim=1).cpu()


def _opened(path: Path) -> Image:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _training_images(run: Run, count: int) -> Iterator[Image]:
    """Up to `count` training images, evenly spaced over all buckets, cropped as they are trained. Broken ones are left out."""
    from PIL.Image import fromarray

    buckets = run.data.order.buckets
    ends = np.cumsum([len(content) for content in buckets])
    for place in np.unique(np.linspace(0, ends[-1] - 1, count).astype(int)):
        bucket = int(np.searchsorted(ends, place, side="right"))
        content, inside = buckets[bucket], int(place - (ends[bucket - 1] if bucket else 0))
        (sample,) = content.numbers(inside, inside + 1)
        try:
            pixels, _ = fixed_crop(run.data, int(sample), content.bucket)
        except BadSampleError:
            continue  # which training reports when it reads it
        yield fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, 2)))


def _problems(option: str, folder: Path | None, kind: str) -> Iterator[Problem]:
    """Why a folder has no model of a kind."""
    if folder is None:
        return
    if find_spec("transformers") is None:
        fix = "pip install 'smalti-validation[scores]'"
        yield Problem(message=f"{option} needs transformers, which is not installed", where=option, fix=fix)
        return
    fix = f"--{option}=FOLDER with a {kind} model as `save_pretrained` of transformers writes it"
    try:
        found = load_json(read_regular(folder / "config.json"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Problem(message=f"{folder} has no model of transformers: {error}", where=option, fix=fix)
        return
    if not str(found).startswith(kind):
        yield Problem(message=f"{folder} has a model of the type {found}", where=option, fix=fix)


def scores_of(config: Config) -> Scores | None:
    """The scores of a run; None without weights."""
    options = config[ValidationOptions]
    return Scores(options) if options.clip_weights or options.dino_weights else None
