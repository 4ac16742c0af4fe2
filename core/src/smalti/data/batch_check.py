"""Checks before a launch that every bucket fills a batch; the message says how to fix it.

effective batch size = train_batch_size x ranks x gradient_accumulation_steps. Every aspect bucket needs that many samples,
repeats counted; otherwise each of its batches would hold some image several times. Batches of larger buckets do not, with two
exceptions: where one bucket has different repeats, an image may meet its copies; and in order 1 (see `order`) a batch that
reaches over the end of a pass may hold an image of both passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from smalti.data.buckets import Bucket
from smalti.errors import PreflightError


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How the samples of one optimizer step are laid out.

    `ranks` counts data-parallel ranks: those that share one sequence count as one.
    """

    train_batch_size: int
    ranks: int
    accumulation: int

    def __post_init__(self) -> None:
        if min(self.train_batch_size, self.ranks, self.accumulation) < 1:
            raise ValueError("train_batch_size, ranks and accumulation must be at least 1")

    @property
    def effective(self) -> int:
        return self.train_batch_size * self.ranks * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Share:
    """One dataset's part of a bucket. `repeats` is 0 if the user did not set it."""

    dataset: str
    samples: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class BucketCount:
    """The contents of a bucket, by dataset."""

    bucket: Bucket
    shares: tuple[Share, ...]

    @property
    def total(self) -> int:
        """Samples in an epoch, repeats counted."""
        return sum(share.samples * (share.repeats + 1) for share in self.shares)

    @property
    def adjustable(self) -> tuple[str, ...]:
        """The datasets whose repeats the user did not set."""
        return tuple(share.dataset for share in self.shares if not share.repeats)

    def total_with(self, repeats: int, *, override_manual: bool) -> int:
        """Samples in an epoch with at least these repeats; repeats that the user set are raised only with `override_manual`."""
        return sum(
            share.samples * ((max(share.repeats, repeats) if override_manual or not share.repeats else share.repeats) + 1)
            for share in self.shares
        )

    def needed_repeats(self, effective: int, *, override_manual: bool) -> int | None:
        """Returns the fewest repeats that fill a batch; None if that needs a change of repeats that the user set."""
        if not override_manual and not self.adjustable:
            return None
        return next(number for number in count() if self.total_with(number, override_manual=override_manual) >= effective)


def short_buckets_error(
    counts: Sequence[BucketCount], short: Sequence[BucketCount], shape: BatchShape, *, allowed: bool = False
) -> PreflightError:
    """The error with the numbers of the short buckets and the ways out. `allowed`: repeats may be raised already."""
    minimum = max(one.needed_repeats(shape.effective, override_manual=True) or 0 for one in short)
    lines = ["Dataset configuration will produce zero usable batches.", "", "Current configuration:"]
    for dataset, shares in _by_dataset(counts, short).items():
        lines += [
            f"  - Dataset ID: {dataset}",
            f"      total samples: {sum(share.samples for share in shares)}",
            f"      repeats: {shares[0].repeats}",
        ]
    lines += [
        f"  - batch size (train_batch_size): {shape.train_batch_size}",
        f"  - ranks: {shape.ranks}",
        f"  - gradient accumulation steps: {shape.accumulation}",
        f"  - effective batch size: {shape.train_batch_size} x {shape.ranks} x {shape.accumulation} = {shape.effective}",
        "",
        f"{len(short)} bucket(s) have too few samples:",
    ]
    for one in short:
        needed = one.needed_repeats(shape.effective, override_manual=True)
        lines.append(f"  - {one.bucket}: {_sum(one)}, needs {shape.effective}. Minimum repeats required: {needed}")
    lines += ["", "To fix this, do any one of these:", *_suggestions(short, shape, minimum, allowed, len(counts))]
    if any(share.repeats for one in short for share in one.shares):
        lines += ["", "Note: repeats that you set are not changed by --allow_dataset_oversubscription."]
    return PreflightError("\n".join(lines))


def _by_dataset(counts: Sequence[BucketCount], short: Sequence[BucketCount]) -> dict[str, list[Share]]:
    """All shares of the datasets with a bucket that is too small."""
    names = sorted({share.dataset for one in short for share in one.shares})
    return {name: [share for one in counts for share in one.shares if share.dataset == name] for name in names}


def _sum(one: BucketCount) -> str:
    terms = [f"{share.samples} samples x ({share.repeats} repeats + 1)" for share in one.shares]
    return f"{' + '.join(terms)} = {one.total}"


def _suggestions(short: Sequence[BucketCount], shape: BatchShape, minimum: int, allowed: bool, buckets: int) -> list[str]:
    fewest = min(one.total for one in short)
    ways = []
    for name, value in (
        ("a smaller --train_batch_size", shape.train_batch_size),
        ("fewer --gradient_accumulation_steps", shape.accumulation),
        ("fewer ranks (--num_processes)", shape.ranks),
    ):
        most = fewest // (shape.effective // value)
        if 1 <= most < value:
            ways.append(f"{name}: {most} instead of {value}")
    ways += [
        f"more repeats: at least {minimum} in every dataset named above",
        "more images of these shapes, or none; with crop and crop_aspect=square all share one bucket",
    ]
    if 0 < len(short) < buckets:
        ways.append("--short_buckets=drop: leaves these buckets out; merge: trains their images in the nearest aspect ratio")
    if not allowed:
        ways.append("--allow_dataset_oversubscription: raises the repeats of these buckets automatically")
    return [f"  {number}. {way}" for number, way in enumerate(ways, start=1)]
