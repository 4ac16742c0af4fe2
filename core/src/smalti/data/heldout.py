"""Pictures that are never trained on, to measure the loss on them: in which batches they come, and reading them.

The batches do not depend on the number of ranks, because the last bits of a sample's loss can depend on its neighbours. Ranks
get whole batches. A picture's number, from which its noise is drawn, comes from its name: others can come and go.

Shapes: B pictures of a batch, H, W pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smalti.data.buckets import Bucket
from smalti.data.pixels import Bytes, crop, decode, normalised
from smalti.data.prepared import PreparedData
from smalti.data.quarantine import BadSampleError
from smalti.hashing import fraction, key_of, text_hash
from smalti.models.frames import Frame
from smalti.storage import StorageError, TransientStorageError

_READERS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutBatch:
    """Some samples of one bucket. `place` is that of the first one among all samples that are held out."""

    place: int
    bucket: Bucket
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutPictures:
    """A batch that was read: `pixels` (B, 3, H, W), fp32 in [-1, 1], on the device that was asked for.

    `numbers` belong to the pictures for good. `readable` is (B,), 1 or 0: a picture that cannot be read is blank and counts
    for nothing.
    """

    pixels: Tensor
    captions: tuple[str, ...]
    frames: tuple[Frame, ...]
    numbers: tuple[int, ...]
    readable: Tensor


class HeldOut:
    """All samples of `data`, in batches of up to `batch` pictures."""

    def __init__(self, data: PreparedData, *, batch: int, device: str) -> None:
        self._data = data
        self._device = device
        self._bad: set[int] = set()
        self.batches: list[HeldOutBatch] = []
        self.count = 0
        """Samples in all."""
        for content in data.order.buckets:
            samples = [int(sample) for sample in content.samples]
            for start in range(0, len(samples), batch):
                chosen = tuple(samples[start : start + batch])
                self.batches.append(HeldOutBatch(place=self.count, bucket=content.bucket, samples=chosen))
                self.count += len(chosen)

    def share(self, rank: int, ranks: int) -> Iterator[tuple[HeldOutBatch, bool]]:
        """The batches of one rank, each with whether it counts.

        Every rank gets the same number, because under a sharded model each forward pass is collective; the last one fills up.
        """
        for first in range(0, len(self.batches), ranks):
            mine = first + rank
            yield self.batches[min(mine, len(self.batches) - 1)], mine < len(self.batches)

    def read(self, batch: HeldOutBatch) -> HeldOutPictures:
        """Raises what the storage raises when it is out of reach; pictures that are broken are told of once."""
        with ThreadPoolExecutor(_READERS, "smalti-held-out") as pool:
            found = list(pool.map(lambda sample: self._visit(sample, batch.bucket), batch.samples))
        pixels = np.stack([picture for picture, _ in found])
        return HeldOutPictures(
            pixels=normalised(torch.from_numpy(pixels).to(self._device)),
            captions=tuple(self._caption(sample) for sample in batch.samples),
            frames=tuple(frame for _, frame in found),
            numbers=tuple(self._number(sample) for sample in batch.samples),
            readable=torch.tensor([sample not in self._bad for sample in batch.samples], dtype=torch.float32),
        )

    def _visit(self, sample: int, bucket: Bucket) -> tuple[Bytes, Frame]:
        position, row = self._data.locate(sample)
        dataset, framing = self._data.datasets[position], self._data.framings[position]
        key, number = dataset.index.key(row), self._number(sample)
        try:
            picture = decode(dataset.storage.read(key), framing, bucket)
        except TransientStorageError:
            raise
        except (BadSampleError, StorageError) as error:
            if sample not in self._bad:
                _log.warning("%s: %s is held out and cannot be read, so it does not count: %s", dataset.spec.id, key, error)
            self._bad.add(sample)
            picture = np.full((3, bucket.height, bucket.width), 255, dtype=np.uint8)
        left = top = 0
        if picture.shape != (3, bucket.height, bucket.width):
            draw = fraction(key_of("across", number)), fraction(key_of("down", number))
            left, top = framing.corner((picture.shape[2], picture.shape[1]), bucket, draw)
            picture = crop(picture, bucket, (left, top))
        width, height = int(dataset.index.widths[row]), int(dataset.index.heights[row])
        return picture, Frame(width=width, height=height, left=left, top=top)

    def _caption(self, sample: int) -> str:
        """Of several captions always the first."""
        position, row = self._data.locate(sample)
        return self._data.datasets[position].index.captions(row)[0]

    def _number(self, sample: int) -> int:
        position, row = self._data.locate(sample)
        dataset = self._data.datasets[position]
        return key_of("held out", dataset.spec.id, text_hash(dataset.index.key(row)))
