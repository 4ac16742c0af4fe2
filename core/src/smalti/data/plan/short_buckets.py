"""What becomes of the samples of buckets that cannot fill a batch: `--short_buckets`.

Images in many shapes always have some that are rare. By default they are trained in the bucket of the nearest aspect ratio.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from smalti.data.batch_check import BatchShape, BucketCount, short_buckets_error
from smalti.data.buckets import Bucket

ShortBuckets = Literal["merge", "repeat", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class Handled:
    """What is done about short buckets.

    Args:
        moved: the new bucket of a dataset's samples, by dataset and bucket; None where they are left out.
        raised: repeats of the datasets in a bucket whose repeats the user did not set.
        notices: messages for the user, with all buckets and numbers.
    """

    moved: Mapping[tuple[str, Bucket], Bucket | None] = field(default_factory=dict)
    raised: Mapping[Bucket, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def bucket(self, dataset: str, bucket: Bucket) -> Bucket | None:
        """The bucket in which samples are trained; None if they are left out."""
        return self.moved.get((dataset, bucket), bucket)

    @property
    def datasets(self) -> frozenset[str]:
        """The datasets of which samples are moved or left out."""
        return frozenset(dataset for dataset, _ in self.moved)


def handle_short_buckets(
    counts: Sequence[BucketCount], shape: BatchShape, policy: ShortBuckets, resolutions: Mapping[str, Hashable]
) -> Handled:
    """Decide about buckets with fewer samples than a batch.

    `resolutions`: samples of a dataset are merged into buckets of datasets with the same value only. Raises PreflightError if
    the policy is "error", and where it does not help: no bucket of the resolution fills a batch, or repeats were set.
    """
    short = [one for one in counts if one.total < shape.effective]
    if not short:
        return Handled()
    if policy in ("repeat", "error"):
        needed = {one.bucket: one.needed_repeats(shape.effective, override_manual=False) for one in short}
        raised = {bucket: repeats for bucket, repeats in needed.items() if repeats is not None}
        if policy == "error" or len(raised) < len(short):
            raise short_buckets_error(counts, short, shape, allowed=policy == "repeat")
        return Handled(raised=raised, notices=tuple(_raised(one, raised[one.bucket], shape) for one in short))
    if policy == "drop":
        if len(short) == len(counts):
            raise short_buckets_error(counts, short, shape)
        moved: dict[tuple[str, Bucket], Bucket | None] = {
            (share.dataset, one.bucket): None for one in short for share in one.shares
        }
        return Handled(moved=moved, notices=(_dropped(counts, short, shape),))
    full = [one for one in counts if one.total >= shape.effective]
    near_of: dict[Hashable, list[Bucket]] = {
        resolution: [one.bucket for one in full if any(resolutions[share.dataset] == resolution for share in one.shares)]
        for resolution in set(resolutions.values())
    }
    targets: dict[tuple[str, Bucket], Bucket] = {}
    for one in short:
        for share in one.shares:
            near = near_of[resolutions[share.dataset]]
            if not near:
                alone = [other for other in short if share.dataset in {each.dataset for each in other.shares}]
                raise short_buckets_error(counts, alone, shape)
            targets[share.dataset, one.bucket] = min(near, key=lambda bucket: (_distance(bucket, one.bucket), bucket))
    return Handled(moved=targets, notices=(_merged(short, targets, shape),))


def _distance(one: Bucket, other: Bucket) -> float:
    """How different two aspect ratios are; equal for images and their transposes."""
    return abs(math.log(one.width * other.height / (one.height * other.width)))


def _raised(one: BucketCount, repeats: int, shape: BatchShape) -> str:
    names = ", ".join(one.adjustable)
    why = f"{one.total} samples do not fill an effective batch of {shape.effective}"
    return f"bucket {one.bucket}: repeats raised to {repeats} ({names}), because {why}"


def _merged(short: Sequence[BucketCount], targets: Mapping[tuple[str, Bucket], Bucket], shape: BatchShape) -> str:
    moves = []
    for one in short:
        there = sorted({str(targets[share.dataset, one.bucket]) for share in one.shares})
        moves.append(f"{one.bucket} ({_samples(one.total)}) to {' and '.join(there)}")
    what = "their images are trained in the nearest aspect ratio (--short_buckets=merge)"
    return f"{_too_small(short, shape)}; {what}: {', '.join(moves)}"


def _dropped(counts: Sequence[BucketCount], short: Sequence[BucketCount], shape: BatchShape) -> str:
    lost, total = sum(one.total for one in short), sum(one.total for one in counts)
    names = ", ".join(f"{one.bucket} ({_samples(one.total)})" for one in short)
    return f"{_too_small(short, shape)}; {lost} of {total} samples are left out (--short_buckets=drop): {names}"


def _too_small(short: Sequence[BucketCount], shape: BatchShape) -> str:
    return f"{len(short)} bucket{'s do' if len(short) > 1 else ' does'} not fill an effective batch of {shape.effective}"


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"
