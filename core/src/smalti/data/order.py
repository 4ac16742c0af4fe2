"""The order of samples: a pure function of (samples, seed, effective batch), the same in every process.

Every bucket yields its samples as an endless stream of passes; a pass is all its samples in a permutation that (seed, bucket,
number of the pass) determine. Global batches of one bucket are consecutive slices of its stream, without gaps, so samples that
remain at the end of an epoch start the next one: no sample is dropped or repeated. Epoch e takes as many batches of a bucket
of n samples as fit: floor((e+1) n/B) - floor(e n/B) for batches of B. The batches of an epoch are shuffled by (seed, epoch).

The state of the order is one number, the position: how many global batches came before. Ranks, worker threads and gradient
accumulation only split a global batch, so they cannot change which samples are seen, and a resume is exact.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from smalti.data.buckets import Bucket
from smalti.system import derive_seed, permutation

Numbers = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSamples:
    """The samples of a bucket by number, each once, and how often each is seen in an epoch (repeats + 1)."""

    bucket: Bucket
    samples: Numbers
    copies: Numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """One step's samples over all ranks and micro-batches, all of one bucket.

    `first` is the place of the batch in the stream of its bucket, in samples. `numbers` are unique over the run: they
    seed everything that is random in a visit (noise, timestep, crop).
    """

    position: int
    epoch: int
    bucket: Bucket
    samples: Numbers
    first: int

    @property
    def numbers(self) -> range:
        return range(self.position * len(self.samples), (self.position + 1) * len(self.samples))


class Order:
    """All batches of a run, by position. Cheap to create; safe to use from several threads.

    Args:
        buckets: in any order; each with at least one sample.
        seed: of the run.
        effective_batch: samples per optimizer step over all ranks and micro-batches.
    """

    def __init__(self, buckets: Sequence[BucketSamples], *, seed: int, effective_batch: int) -> None:
        if effective_batch < 1 or not buckets or any(len(bucket.samples) == 0 for bucket in buckets):
            raise ValueError("an order needs an effective batch and samples in every bucket")
        self.buckets = tuple(sorted(buckets, key=lambda one: one.bucket))
        self.seed = seed
        self.effective_batch = effective_batch
        self._permutations = [_BucketPermutation(bucket) for bucket in self.buckets]
        self._samples_per_epoch = np.array([bucket.copies.sum() for bucket in self.buckets], dtype=np.int64)
        # A batch may span two passes, and threads may work on both sides of the end of an epoch.
        self._passes: _Recent[Numbers] = _Recent(2 * len(self.buckets) + 2)
        self._epochs: _Recent[_Epoch] = _Recent(2)

    def batch(self, position: int) -> GlobalBatch:
        """The global batch at a position, 0 being the first of the run."""
        number = self.epoch_of(position)
        epoch = self._epochs.get(number, partial(self._make_epoch, number))
        step = position - epoch.start
        bucket = int(epoch.buckets[step])
        first = int(epoch.ordinals[step]) * self.effective_batch
        return GlobalBatch(
            position=position,
            epoch=number,
            bucket=self.buckets[bucket].bucket,
            samples=self._stream(bucket, first, self.effective_batch),
            first=first,
        )

    def epoch_of(self, position: int) -> int:
        """Returns the epoch, from 0, of the batch at a position."""
        if position < 0:
            raise ValueError("positions count from 0")
        # An epoch holds at least total/B - buckets batches.
        total = int(self._samples_per_epoch.sum())
        latest = (position + 1 + len(self.buckets)) * self.effective_batch // total + 1
        return bisect_right(range(latest + 1), position, key=self.epoch_start) - 1

    def epoch_start(self, epoch: int) -> int:
        """The position at which an epoch begins."""
        return int((self._samples_per_epoch * epoch // self.effective_batch).sum())

    def replacements(self, batch: GlobalBatch, slot: int) -> Iterator[int]:
        """Yields replacements for a sample that cannot be read: those that follow it in the stream of its bucket.

        They include every sample of the bucket. They are the same on every rank, because they depend on the sample's place
        only: a rank that replaces one need not communicate.
        """
        bucket = bisect_right(self.buckets, batch.bucket, key=lambda one: one.bucket) - 1
        size = self._permutations[bucket].size
        start = batch.first + slot + 1
        for place in range(start, start + 2 * size, self.effective_batch):
            for sample in self._stream(bucket, place, min(self.effective_batch, start + 2 * size - place)):
                yield int(sample)

    def _stream(self, bucket: int, start: int, count: int) -> Numbers:
        """Returns `count` samples of a bucket's stream from a place in it."""
        bucket_permutation = self._permutations[bucket]
        parts = []
        while count > 0:
            number, offset = divmod(start, bucket_permutation.size)
            shuffled = self._passes.get((bucket, number), partial(bucket_permutation.shuffled, self.seed, number))
            part = shuffled[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _make_epoch(self, number: int) -> _Epoch:
        before, after = (self._samples_per_epoch * epoch // self.effective_batch for epoch in (number, number + 1))
        counts = after - before
        buckets = np.repeat(np.arange(len(counts)), counts)[
            permutation(int(counts.sum()), derive_seed("epoch", self.seed, number))
        ]
        ordinals = np.empty(len(buckets), dtype=np.int64)
        for bucket, (first, count) in enumerate(zip(before, counts, strict=True)):
            ordinals[buckets == bucket] = np.arange(first, first + count)
        return _Epoch(start=int(before.sum()), buckets=buckets, ordinals=ordinals)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    """One epoch, by step: the bucket, and which batch of that bucket it is since the start of the run."""

    start: int
    buckets: Numbers
    ordinals: Numbers


class _BucketPermutation:
    """The samples of one pass of a bucket, and their permutations.

    Repeats that all samples share do not make a pass longer, but passes more frequent: so the copies of an image are far
    apart.
    """

    def __init__(self, content: BucketSamples) -> None:
        common = math.gcd(*(int(copies) for copies in np.unique(content.copies)))
        self._bucket = content.bucket
        self._samples = np.repeat(content.samples, content.copies // common).astype(np.int64)
        self.size = len(self._samples)

    def shuffled(self, seed: int, number: int) -> Numbers:
        key = derive_seed("pass", seed, self._bucket.width, self._bucket.height, number)
        return self._samples[permutation(self.size, key)]


class _Recent(Generic[T]):
    """Caches the last few results of a computation. One thread computes, the others wait for it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        with self._lock:
            if key not in self._values:
                self._values[key] = compute()
                if len(self._values) > self._capacity:
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
            return self._values[key]
