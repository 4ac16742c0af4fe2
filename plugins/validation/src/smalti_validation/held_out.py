"""Held-out images, on which the evaluation loss is measured: their batches, and how they are read.

The batches do not depend on the number of ranks, because the last bits of a sample's loss can depend on its neighbours. Each
batch belongs to one rank. The number of an image, which seeds its noise, depends on its name alone.

Shapes: B images of a batch, H, W pixels, latents (B, C, h, w).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smalti.data import (
    BadSampleError,
    Bucket,
    CachedLatents,
    CachedTexts,
    Column,
    CropOffset,
    DatasetSpec,
    Framing,
    MicroBatch,
    PreparedData,
    fixed_crop,
    normalised,
)
from smalti.diffusion import Conditioning
from smalti.models import SizeConditioning
from smalti.system import derive_seed, text_hash

_READERS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutBatch:
    """Some samples of one bucket. `place` is the index of the first one among all held-out samples."""

    place: int
    bucket: Bucket
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutImages:
    """A batch that was read, on the device that was asked for: `pixels` (B, 3, H, W), fp32 in [-1, 1], or else `latents`
    as they were kept.

    `conditioning` is that of the captions, if texts were encoded before. `numbers` belong to the images for good. `readable`
    is (B,), 1 or 0: an image that cannot be read is white and does not count. `datasets` and `columns` are as for training.
    """

    bucket: Bucket
    pixels: Tensor | None
    latents: Tensor | None
    captions: tuple[str, ...]
    conditioning: Conditioning | None
    size_conditioning: tuple[SizeConditioning, ...]
    numbers: tuple[int, ...]
    readable: Tensor
    datasets: tuple[DatasetSpec, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def micro_batch(self) -> MicroBatch:
        """What terms of the loss read."""
        return MicroBatch(
            bucket=self.bucket,
            pixels=self.pixels,
            latents=self.latents,
            conditioning=self.conditioning,
            captions=self.captions,
            numbers=self.numbers,
            keys=("",) * len(self.numbers),
            size_conditioning=self.size_conditioning,
            datasets=self.datasets,
            columns=self.columns,
        )


class HeldOut:
    """All samples of `data`, in batches of up to `batch` images; `latents` and `texts` as far as they were encoded before.

    `latent_shape` is that of the latents of an image of this width and height, for masks.
    """

    def __init__(
        self,
        data: PreparedData,
        *,
        batch: int,
        device: str,
        latents: CachedLatents | None = None,
        texts: CachedTexts | None = None,
        latent_shape: Callable[[int, int], Sequence[int]] = lambda width, height: (height, width),
    ) -> None:
        self._data = data
        self._latent_shape = latent_shape
        self._columns: dict[str, Column] = {}
        for dataset in data.datasets:
            self._columns |= dataset.columns
        self._device = device
        self._latents = latents
        self._texts = texts
        self._bad: set[int] = set(latents.broken) if latents is not None else set()
        self.batches: list[HeldOutBatch] = []
        self.count = 0
        """Number of samples."""
        for content in data.order.buckets:
            samples = [int(sample) for sample in content.samples]
            for start in range(0, len(samples), batch):
                chosen = tuple(samples[start : start + batch])
                self.batches.append(HeldOutBatch(place=self.count, bucket=content.bucket, samples=chosen))
                self.count += len(chosen)

    @cached_property
    def numbers(self) -> NDArray[np.uint64]:
        """(N,), the numbers of all images, in the order of the batches."""
        return np.array([number for batch in self.batches for number in map(self._number, batch.samples)], dtype=np.uint64)

    @property
    def names(self) -> dict[int, str]:
        """Dataset and name of all images, by number."""
        found = ((number, self._data.sample(number)) for batch in self.batches for number in batch.samples)
        return {self._number(number): f"{sample.dataset.spec.id}: {sample.key}" for number, sample in found}

    def _number(self, sample: int) -> int:
        """The number of an image, which seeds its noise: it depends on dataset and name alone."""
        found = self._data.sample(sample)
        return derive_seed("held out", found.dataset.spec.id, text_hash(found.key))

    def share(self, rank: int, ranks: int) -> Iterator[tuple[HeldOutBatch, bool]]:
        """Yields the batches of one rank, and for each whether it counts.

        Every rank gets the same number of batches, because the forward pass of a sharded model is collective; a rank with fewer
        repeats the last batch.
        """
        for first in range(0, len(self.batches), ranks):
            mine = first + rank
            yield self.batches[min(mine, len(self.batches) - 1)], mine < len(self.batches)

    def read(self, batch: HeldOutBatch) -> HeldOutImages:
        """Raises what the storage raises when it is out of reach; images that are broken are reported once."""
        read = self._encoded if self._latents is not None else self._visit
        with ThreadPoolExecutor(_READERS, "smalti-held-out") as pool:
            found = list(pool.map(lambda sample: read(sample, batch.bucket), batch.samples))
        samples = [self._data.sample(number) for number in batch.samples]
        images = torch.stack([image for image, _ in found]).to(self._device)
        columns = [self._columns_of(one, batch.bucket, offset) for one, (_, offset) in zip(batch.samples, found, strict=True)]
        captions = tuple(sample.dataset.caption_policy.first(sample.captions) for sample in samples)
        conditioning = None
        if self._texts is not None:
            conditioning = {name: rows.to(self._device) for name, rows in self._texts.rows(captions).items()}
        return HeldOutImages(
            bucket=batch.bucket,
            pixels=normalised(images) if self._latents is None else None,
            latents=images if self._latents is not None else None,
            captions=captions,
            conditioning=conditioning,
            size_conditioning=tuple(
                SizeConditioning.of(sample.size, offset) for sample, (_, offset) in zip(samples, found, strict=True)
            ),
            numbers=tuple(map(self._number, batch.samples)),
            readable=torch.tensor([sample not in self._bad for sample in batch.samples], dtype=torch.float32),
            datasets=tuple(sample.dataset.spec for sample in samples),
            columns={name: torch.stack([each[name] for each in columns]).to(self._device) for name in self._columns},
        )

    def _columns_of(self, number: int, bucket: Bucket, offset: CropOffset) -> dict[str, Tensor]:
        """What the image has beside its caption, such as a mask; of one that cannot be read, what counts fully."""
        if not self._columns:
            return {}
        sample, (height, width) = self._data.sample(number), self._latent_shape(bucket.width, bucket.height)[-2:]
        scaled = sample.crop_settings.resized(*sample.size, bucket)
        framing = Framing(bucket=bucket, scaled=scaled, offset=offset, flipped=False, latents=(width, height))
        found = {name: column.neutral(framing) for name, column in self._columns.items()}
        if number in self._bad:
            return found
        try:
            return found | {name: column.read(sample, framing) for name, column in sample.dataset.columns.items()}
        except BadSampleError as error:
            self._leave_out(number, error)
            return found

    def _leave_out(self, number: int, error: BadSampleError) -> None:
        """Remember an image that cannot be used, and report it once."""
        if number not in self._bad:
            found = self._data.sample(number)
            message = "%s: held-out image %s cannot be read, so it is not evaluated: %s"
            _log.warning(message, found.dataset.spec.id, found.key, error)
        self._bad.add(number)

    def _encoded(self, sample: int, bucket: Bucket) -> tuple[Tensor, CropOffset]:
        """Returns latents (C, h, w), and the offset of the crop; for a broken image, those of another one."""
        assert self._latents is not None
        if sample in self._bad:
            sample = next(other for other in self._samples_of(bucket) if other not in self._bad)
        return self._latents.get(sample, bucket)

    def _samples_of(self, bucket: Bucket) -> Iterator[int]:
        return (sample for batch in self.batches if batch.bucket == bucket for sample in batch.samples)

    def _visit(self, sample: int, bucket: Bucket) -> tuple[Tensor, CropOffset]:
        """Returns the image (3, H, W) as bytes, and the offset of the crop."""
        try:
            image, offset = fixed_crop(self._data, sample, bucket)
        except BadSampleError as error:
            self._leave_out(sample, error)
            image, offset = np.full((3, bucket.height, bucket.width), 255, dtype=np.uint8), (0, 0)
        return torch.from_numpy(image), offset
