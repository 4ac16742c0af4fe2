"""The order of samples: a pure function of (samples, seed, effective batch), the same in every process.

Every bucket yields its samples as an endless stream of passes; a pass is all its samples in a permutation that (seed, bucket,
number of the pass) determine. Global batches of one bucket are consecutive slices of its stream, without gaps, so samples that
remain at the end of an epoch start the next one: no sample is dropped or repeated. Epoch e takes as many batches of a bucket
of n samples as fit: floor((e+1) n/B) - floor(e n/B) for batches of B. The batches of an epoch are shuffled by (seed, epoch).

The state of the order is one number, the position: how many global batches came before. Ranks, worker threads and gradient
accumulation only split a global batch, so they cannot change which samples are seen, and a resume is exact.

There are two versions of it, chosen by size. Order 1 stores permutations. In order 2, for runs with a pass or an epoch above
`LIMIT`, permutations that long are computed place by place, so that neither memory nor the time to reach a position depends on
the number of samples. Its batches that reach over the end of a pass do not hold a sample twice; those of order 1 may.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from smalti.data.buckets import Bucket
from smalti.system import ComputedPermutation, derive_seed, permutation

Numbers = NDArray[np.int64]
Version = Literal[1, 2]

LIMIT = 1 << 16
"""Samples of a pass, and batches of an epoch, up to which permutations are stored. Changing it changes the order of runs."""


class Passes(Protocol):
    """Another order of the samples in each pass than a permutation of all of them; from a plugin (`CacheEntry.order`)."""

    @property
    def settings(self) -> dict[str, object]:
        """Names and values of the options that determine it, as JSON. A resume with others begins another order."""

    def __call__(self, parts: Sequence[tuple[int, int]], batch: int, key: int) -> Callable[[Numbers], Numbers]:
        """Returns the place of the sample at each position of a pass: a permutation, which `key` determines.

        `parts` are rows and copies of each; a row has consecutive places for its copies. `batch` is the effective batch.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Samples of one dataset in a bucket.

    Args:
        dataset: position of the dataset among those of the run.
        rows: of its index, ascending; may be mapped.
        copies: how often each is seen in an epoch (repeats + 1); a fraction where datasets are weighted.
        offset: what is added to a row to make it the number of a sample.
        digest: of the rows, for the identity of the data.
    """

    dataset: int
    rows: NDArray[np.uint32]
    copies: int | Fraction = 1
    offset: int = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSamples:
    """The samples of a bucket, each once, in parts."""

    bucket: Bucket
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def per_epoch(self) -> Fraction:
        """Samples in an epoch, repeats counted."""
        return Fraction(sum(len(part.rows) * part.copies for part in self.parts))

    @property
    def samples(self) -> Numbers:
        """The numbers of all samples: 8 bytes each. `numbers` returns some of them."""
        return self.numbers(0, len(self))

    def numbers(self, start: int, stop: int) -> Numbers:
        """The numbers of the samples from one place to another, counted through the parts."""
        found = [np.empty(0, dtype=np.int64)]
        for part in self.parts:
            found.append(part.rows[max(0, start) : max(0, stop)].astype(np.int64) + part.offset)
            start, stop = start - len(part.rows), stop - len(part.rows)
        return np.concatenate(found)


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


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where an order began that a run changed to because its data had changed: the position, and the epoch from there."""

    position: int
    epoch: int


class Order:
    """All batches of a run, by position. Cheap to create; safe to use from several threads.

    Args:
        buckets: in any order; each with at least one sample.
        seed: of the run.
        effective_batch: samples per optimizer step over all ranks and micro-batches.
        version: that of the run; None for a new run: 1 unless a pass or an epoch exceeds `LIMIT`.
        beginning: where the run changed to this order; None if it began with it.
        passes: the order in each pass; None permutes all samples.
    """

    def __init__(
        self,
        buckets: Sequence[BucketSamples],
        *,
        seed: int,
        effective_batch: int,
        version: Version | None = None,
        beginning: Beginning | None = None,
        passes: Passes | None = None,
    ) -> None:
        if effective_batch < 1 or not buckets or any(len(bucket) == 0 for bucket in buckets):
            raise ValueError("an order needs an effective batch and samples in every bucket")
        self.buckets = tuple(sorted(buckets, key=lambda one: one.bucket))
        self.seed = seed
        self.effective_batch = effective_batch
        self.beginning = beginning
        self.end: int | None = None
        """The position at which the order ends; None if it does not."""
        self.passes = passes
        self.schedule = "" if passes is None else f"{passes.settings} "
        """What else determines the order, such as when which datasets are trained on; for the identity of the data."""
        self._contents = [_BucketPass(bucket) for bucket in self.buckets]
        # Samples of an epoch are whole numbers of a common fraction, and so is a batch.
        samples, common = _whole([bucket.per_epoch for bucket in self.buckets])
        self._samples_per_epoch = np.array(samples, dtype=np.int64)
        self._batch = effective_batch * common
        longest_epoch = int((-(-self._samples_per_epoch // self._batch)).sum())
        large = longest_epoch > LIMIT or any(content.size > LIMIT for content in self._contents)
        self.version: Version = version or (2 if large else 1)
        self._stores_epochs = self.version == 1 or longest_epoch <= LIMIT
        self._shift = 0 if beginning is None else beginning.position - self._start(beginning.epoch)
        # A batch may span two passes, and threads may work on both sides of the end of an epoch.
        self._passes = lru_cache(2 * len(self.buckets) + 2)(self._shuffle)
        self._epochs = lru_cache(2)(self._make_epoch)
        self._computing = threading.Lock()
        """Held while one is computed: other threads that need it wait, instead of computing it too."""

    def changed_to(self, *, version: Version | None = None, beginning: Beginning | None = None) -> Order:
        """The same samples in another version of the order, or from another beginning."""
        return type(self)(self.buckets, version=version, beginning=beginning, **self._settings())

    def _settings(self) -> dict[str, Any]:
        """What is the same in every version of the order."""
        return {"seed": self.seed, "effective_batch": self.effective_batch, "passes": self.passes}

    def batch(self, position: int) -> GlobalBatch:
        """The global batch at a position, 0 being the first of the run."""
        number = self.epoch_of(position)
        with self._computing:
            epoch = self._epochs(number)
        bucket, ordinal = epoch.turn(position - self.epoch_start(number))
        first = ordinal * self.effective_batch
        return GlobalBatch(
            position=position,
            epoch=number,
            bucket=self.buckets[bucket].bucket,
            samples=self._stream(bucket, first, self.effective_batch),
            first=first,
        )

    def epoch_of(self, position: int) -> int:
        """Returns the epoch, from 0, of the batch at a position."""
        if position < (0 if self.beginning is None else self.beginning.position):
            raise ValueError("positions count from 0, or from the beginning of the order")
        place = position - self._shift
        # An epoch holds at least total/B - buckets batches.
        total = int(self._samples_per_epoch.sum())
        latest = (place + 1 + len(self.buckets)) * self._batch // total + 1
        return bisect_right(range(latest + 1), place, key=self._start) - 1

    def epoch_start(self, epoch: int) -> int:
        """The position at which an epoch begins."""
        return self._start(epoch) + self._shift

    def replacements(self, batch: GlobalBatch, slot: int) -> Iterator[int]:
        """Yields replacements for a sample that cannot be read: those that follow it in the stream of its bucket.

        They include every sample of the bucket. They are the same on every rank, because they depend on the sample's place
        only: a rank that replaces one need not communicate.
        """
        bucket = bisect_right(self.buckets, batch.bucket, key=lambda one: one.bucket) - 1
        size = self._contents[bucket].size
        start = batch.first + slot + 1
        for place in range(start, start + 2 * size, self.effective_batch):
            yield from self._stream(bucket, place, min(self.effective_batch, start + 2 * size - place)).tolist()

    def _start(self, epoch: int) -> int:
        return int((self._samples_per_epoch * epoch // self._batch).sum())

    def _stream(self, bucket: int, start: int, count: int) -> Numbers:
        """Returns `count` samples of a bucket's stream from a place in it."""
        content, parts = self._contents[bucket], []
        while count > 0:
            number, offset = divmod(start, content.size)
            take = min(count, content.size - offset)
            parts.append(content.samples(self._places(bucket, number, offset, take)))
            start, count = start + take, count - take
        return np.concatenate(parts)

    def _places(self, bucket: int, number: int, start: int, count: int) -> Numbers:
        """Returns the places that a pass of a bucket comes to from number `start` on."""
        places = self._shuffled(bucket, number)(np.arange(start, start + count))
        batch = self.effective_batch
        if self.version == 2 and start < batch and self._contents[bucket].size >= 2 * batch and number > 0:
            head = self._head_without_doubles(bucket, number)[start : start + count]
            places[: len(head)] = head
        return places

    def _head_without_doubles(self, bucket: int, number: int) -> Numbers:
        """Returns the first B shuffled places of a pass, where its predecessor's last batch reaches into it.

        What would repeat a sample of that batch is swapped with what comes next behind the batch and is not in it. That is
        among the first B: the batch has t samples of the pass before and B - t of this one; if c of these are repeated, at most
        t - c of the next t are in the batch too. Nothing else moves: the end of a pass of 2 B or more is outside, so each pass
        depends on its predecessor's permutation alone.
        """
        size, batch = self._contents[bucket].size, self.effective_batch
        before = number * size % batch
        head = self._shuffled(bucket, number)(np.arange(batch))
        if before:
            present = self._shuffled(bucket, number - 1)(np.arange(size - before, size))
            known = np.isin(head, present)
            doubles = np.flatnonzero(known[: batch - before])
            free = np.flatnonzero(~known[batch - before :])[: len(doubles)] + batch - before
            head[doubles], head[free] = head[free], head[doubles]
        return head

    def _shuffled(self, bucket: int, number: int) -> Callable[[Numbers], Numbers]:
        with self._computing:
            return self._passes(bucket, number)

    def _shuffle(self, bucket: int, number: int) -> Callable[[Numbers], Numbers]:
        shape, size = self.buckets[bucket].bucket, self._contents[bucket].size
        key = derive_seed("pass", self.seed, shape.width, shape.height, number)
        if self.passes is not None:
            return self.passes(self._contents[bucket].parts, self.effective_batch, key)
        return ComputedPermutation(size, key) if self.version == 2 and size > LIMIT else _stored(permutation(size, key))

    def _make_epoch(self, number: int) -> _Epoch:
        before, after = (self._samples_per_epoch * epoch // self._batch for epoch in (number, number + 1))
        counts = after - before
        ends, key = np.cumsum(counts), derive_seed("epoch", self.seed, number)
        if not self._stores_epochs:
            return _Epoch(before=before, ends=ends, turns=ComputedPermutation(int(ends[-1]), key))
        # The batches of a bucket come in the order of its stream, so they are numbered again.
        # Narrow numbers are sorted many times as fast.
        names = np.arange(len(counts), dtype=np.min_scalar_type(len(counts)))
        buckets = np.repeat(names, counts)[permutation(int(ends[-1]), key)]
        turns = np.empty(len(buckets), dtype=np.int64)
        turns[np.argsort(buckets, kind="stable")] = np.arange(len(buckets))
        return _Epoch(before=before, ends=ends, turns=_stored(turns))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    """One epoch. `before`: batches of each bucket in earlier epochs; `ends`: cumulative numbers of batches in this one.

    `turns` tells for each step which of these batches it takes, counted through the buckets.
    """

    before: Numbers
    ends: Numbers
    turns: Callable[[Numbers], Numbers]

    def turn(self, step: int) -> tuple[int, int]:
        """Returns the bucket of a step, and which batch of that bucket it is since the start of the run."""
        turn = int(self.turns(np.array([step]))[0])
        bucket = int(np.searchsorted(self.ends, turn, side="right"))
        return bucket, int(self.before[bucket]) + turn - (int(self.ends[bucket - 1]) if bucket else 0)


def _whole(numbers: Sequence[int | Fraction]) -> tuple[list[int], int]:
    """Returns the products with the smallest number that makes all of them whole, and that number."""
    common = math.lcm(*(one.denominator for one in numbers))
    return [one.numerator * (common // one.denominator) for one in numbers], common


class _BucketPass:
    """One pass of a bucket, before it is shuffled: places 0 to size-1.

    Repeats that all samples share do not make a pass longer, but passes more frequent: so the copies of an image are far
    apart.
    """

    def __init__(self, content: BucketSamples) -> None:
        self._parts = [part for part in content.parts if len(part.rows)]
        copies, _ = _whole([part.copies for part in self._parts])
        self.parts = [(len(part.rows), times // math.gcd(*copies)) for part, times in zip(self._parts, copies, strict=True)]
        self._ends = np.cumsum([rows * times for rows, times in self.parts])
        self.size = int(self._ends[-1])

    def samples(self, places: Numbers) -> Numbers:
        """Returns the numbers of the samples at these places."""
        which = np.searchsorted(self._ends, places, side="right")
        found = np.empty(len(places), dtype=np.int64)
        for number, part in enumerate(self._parts):
            mine = np.flatnonzero(which == number)
            start = int(self._ends[number - 1]) if number else 0
            found[mine] = part.rows[(places[mine] - start) // self.parts[number][1]]
            found[mine] += part.offset
        return found


def _stored(numbers: Numbers) -> Callable[[Numbers], Numbers]:
    """Returns the numbers by place, in as little memory as they need."""
    kept = numbers.astype(np.min_scalar_type(max(0, len(numbers) - 1)))
    return lambda places: kept[places].astype(np.int64)
