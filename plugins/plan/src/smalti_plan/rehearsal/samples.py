"""Batches, data and texts of a rehearsal: the largest that a run can meet, without values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from smalti import World
from smalti.config import Config, DataOptions, TrainingOptions
from smalti.data import Batch, Bucket, BucketCount, BucketSamples, CachedTexts, MicroBatch, Order, Part, PreparedData
from smalti.diffusion import Conditioning
from smalti.models import ModelFamily, SizeConditioning

CAPTION = "a photograph of a street at night, " * 200
"""Longer than any encoder reads."""


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
    bucket: Bucket
    world: World
    latents: Tensor | None
    texts: ExampleTexts | None
    host_conditioning: Collection[str] = ()

    def batch(self) -> Batch:
        """One step of this rank."""
        micro = self._micro()
        numbers = range(self.config[TrainingOptions].gradient_accumulation_steps)
        return Batch(position=0, epoch=0, bucket=self.bucket, micro=tuple(replace(micro) for _ in numbers))

    def _micro(self) -> MicroBatch:
        size, device = self.config[DataOptions].train_batch_size, self.world.device
        width, height = self.bucket.width, self.bucket.height
        crop = SizeConditioning.of((width, height))
        pixels = torch.zeros(size, 3, height, width, device=device) if self.latents is None else None
        latents = None if self.latents is None else torch.cat([self.latents] * size).to(device)
        rows, stays = None if self.texts is None else self.texts.rows([""] * size), self.host_conditioning
        return MicroBatch(
            bucket=self.bucket,
            pixels=pixels,
            latents=latents,
            conditioning=rows and {name: row if name in stays else row.to(device) for name, row in rows.items()},
            captions=(CAPTION,) * size,
            numbers=tuple(range(size)),
            keys=("",) * size,
            size_conditioning=(crop,) * size,
        )


def encoded_latents(family: ModelFamily, bucket: Bucket, batch: int, device: str) -> Tensor | None:
    """One row of what the cache of latents would hold, in host memory; None for a family that has no such cache."""
    if not family.cacheable:
        return None
    pixels = torch.zeros(batch, 3, bucket.height, bucket.width, device=device)
    with torch.no_grad():
        return family.raw_latents(pixels)[:1].to("cpu")
