"""Batches, data and texts of a rehearsal: the largest that a run can meet, without values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from smalti import UserError, World
from smalti.config import Config, DataOptions, TrainingOptions
from smalti.data import (
    Batch,
    Bucket,
    BucketCount,
    BucketSamples,
    CachedTexts,
    Column,
    DataDefaults,
    DatasetSpec,
    Framing,
    MicroBatch,
    Order,
    Part,
    PlannedPasses,
    PreparedData,
    SecondCaptions,
    catalog_of,
    parse_datasets,
    pass_parts,
)
from smalti.diffusion import Conditioning
from smalti.models import ModelFamily, SizeConditioning
from smalti.plugins import Plugins
from smalti.training import DenoisingLoss
from smalti_plan.largest_bucket import trained_datasets

CAPTION = "a photograph of a street at night, " * 200
"""Longer than any encoder reads."""
_POSITIONS = 100
"""Batches of which the one counts that makes the most passes: terms of the loss may act in every n-th step."""


def one_bucket(bucket: Bucket, batch: int) -> PreparedData:
    """Data of which every batch is of this size."""
    part = Part(dataset=0, rows=np.arange(batch, dtype=np.uint32))
    order = Order([BucketSamples(bucket=bucket, parts=(part,))], seed=0, effective_batch=batch)
    return PreparedData(
        order=order,
        datasets=(),
        crop_settings=(),
        counts=(BucketCount(bucket=bucket, shares=()),),
        notices=(),
        unusable=0,
        allowed_errors=0,
        offsets=(),
    )


class ExampleTexts:
    """Stands in for `CachedTexts`: every text has the conditioning of the family's example, which is of full length."""

    def __init__(self, rows: Conditioning) -> None:
        self._rows = {name: row[:1] for name, row in rows.items()}

    def rows(self, texts: Sequence[str], *, negative: bool = False) -> Conditioning:
        return {name: torch.cat([row] * len(texts)) for name, row in self._rows.items()}

    @property
    def tokens(self) -> int:
        """The longest sequence among them."""
        return max((row.shape[1] for row in self._rows.values() if row.ndim > 2), default=0)

    def as_cache(self) -> CachedTexts:
        return cast(CachedTexts, self)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a rank trains on. `latents` is one row of cached latents, None if pixels are encoded in every step."""

    config: Config
    plugins: Plugins
    family: ModelFamily
    bucket: Bucket
    world: World
    latents: Tensor | None
    texts: ExampleTexts | None

    def batch(self, loss: DenoisingLoss | None = None) -> Batch:
        """One step of this rank: that of a hundred in which the terms of the loss need the most passes; without it, of none."""
        micro = self._micro(loss)
        numbers = range(self.config[TrainingOptions].gradient_accumulation_steps)
        return Batch(position=0, epoch=0, bucket=self.bucket, micro=tuple(replace(micro) for _ in numbers))

    def _micro(self, loss: DenoisingLoss | None) -> MicroBatch:
        size, device = self.config[DataOptions].train_batch_size, self.world.device
        width, height = self.bucket.width, self.bucket.height
        crop = SizeConditioning.of((width, height))
        pixels = torch.zeros(size, 3, height, width, device=device) if self.latents is None else None
        latents = None if self.latents is None else torch.cat([self.latents] * size).to(device)
        datasets, needs = ((), frozenset[str]()) if loss is None else most_passes(self.config, self.plugins, loss)
        second = {chosen for name in needs if (chosen := pass_parts(name).get("caption"))}
        others = {pass_parts(name).get("latents", "") for name in needs} | {
            turn.latents for turn in (loss.turns if loss else ())
        }
        images = {name: torch.zeros(size, 3, height, width, dtype=torch.uint8, device=device) for name in others - {""}}
        captions = SecondCaptions(captions=(CAPTION,) * size, conditioning=self._conditioning(size))
        return MicroBatch(
            bucket=self.bucket,
            pixels=pixels,
            latents=latents,
            conditioning=self._conditioning(size),
            captions=(CAPTION,) * size,
            numbers=tuple(range(size)),
            keys=("",) * size,
            size_conditioning=(crop,) * size,
            datasets=tuple(islice(cycle(datasets), size)),
            columns=images | self._columns(datasets, size),
            needs=needs,
            second_captions=dict.fromkeys(second, captions),
        )

    def _conditioning(self, size: int) -> Conditioning | None:
        rows, stays = None if self.texts is None else self.texts.rows([""] * size), self.family.host_conditioning
        return rows and {name: row if name in stays else row.to(self.world.device) for name, row in rows.items()}

    def _columns(self, datasets: Sequence[DatasetSpec], size: int) -> dict[str, Tensor]:
        """What plugins read beside the images, without any value of them."""
        catalog, opened = catalog_of(self.plugins), dict[str, Column]()
        for spec in datasets:
            with suppress(UserError):  # as for a folder that is not here: a plan does not need the data
                opened |= catalog.open_columns(spec, datasets)
        shape, width = self.family.latent_shape(self.bucket.width, self.bucket.height), self.bucket.width
        framing = Framing(
            bucket=self.bucket,
            scaled=(width, self.bucket.height),
            offset=(0, 0),
            flipped=False,
            latents=(shape[-1], shape[-2]),
        )
        return {name: torch.stack([column.neutral(framing)] * size).to(self.world.device) for name, column in opened.items()}


def most_passes(config: Config, plugins: Plugins, passes: PlannedPasses) -> tuple[Sequence[DatasetSpec], frozenset[str]]:
    """The datasets of a run, and the most passes that a batch of all of them takes beside "policy".

    Where none is configured, and where there are errors in them, a dataset without keys of its own stands for them.
    """
    nothing = [{"id": "images", "instance_data_dir": "images"}]
    datasets = trained_datasets(config, plugins) or parse_datasets(nothing, where="", defaults=DataDefaults())[0]
    return datasets, max((passes.needs(position, datasets) for position in range(_POSITIONS)), key=len)


def encoded_latents(family: ModelFamily, bucket: Bucket, batch: int, device: str) -> Tensor | None:
    """One row of what the cache of latents would hold, in host memory; None for a family that has no such cache."""
    if not family.cacheable:
        return None
    pixels = torch.zeros(batch, 3, bucket.height, bucket.width, device=device)
    with torch.no_grad():
        return family.raw_latents(pixels)[:1].to("cpu")
