"""What the visits of a run say: which training images are learned least, and at which noise levels the loss has fallen.

The loss depends far more on the noise level than on the image. So each visit counts as its loss divided by the mean of all
visits of the run at about the same level: 1 is an image like the others, in the middle of the run.

Imports no torch. Shapes: V visits, I images, P parts of the run, L noise levels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smalti import UserError
from smalti.config import resolve
from smalti.data import catalog_of, dataset_specs, load_index
from smalti.plugins import load_plugins, schema_of, selection_of
from smalti.rundir import RunDirectory
from smalti_validation.history import Change
from smalti_validation.visits import FOLDER, NOISE_LEVELS, image_number, read_visits

Numbers = NDArray[np.int64]
Values = NDArray[np.float64]
MOST = 1000
"""Images at each end that are named."""
_NARROW = 50
"""Noise levels within which losses are compared."""
_LEVELS = 5
"""Noise levels that are shown: those of evaluations are in their middles, unless a run trains a range of levels."""
_PARTS = 20
_WINDOW = 2
"""So many of the parts make the tenth of a run that a mean is over."""


@dataclass(frozen=True, kw_only=True)
class TrainedLevel:
    """The loss of training images around a noise level, in the first and in the last tenth of the run.

    `change` is how it differs in the last tenth from that around step `change.since`; None if these overlap.
    """

    timestep: int
    visits: int
    first: float
    last: float
    change: Change | None


@dataclass(frozen=True, kw_only=True)
class TrainedImage:
    """An image with its relative loss in the first and the second half of the run; `first` is None without visits in that.

    `interval` is half the width of the 95 % confidence interval of `last`; None where no image has two visits.
    """

    dataset: str
    key: str
    visits: int
    first: float | None
    last: float
    interval: float | None


@dataclass(frozen=True, kw_only=True)
class Learning:
    """All visits of a run. `count` is the number of images with visits in its second half.

    `least` are those with the highest relative loss there, `most` those with the lowest, by the near end of the interval; at
    most `MOST` of each. `unnamed` says why images have numbers for names; "" if they have not.
    """

    visits: int
    count: int
    levels: tuple[TrainedLevel, ...]
    least: tuple[TrainedImage, ...]
    most: tuple[TrainedImage, ...]
    unnamed: str


def read_learning(directory: RunDirectory, best_steps: Mapping[int, int]) -> Learning | None:
    """What the visits of a run say; None if none were kept. Reads them twice, in parts. Raises OSError.

    `best_steps` are by timestep the steps since which a change is taken, such as those with the lowest loss on held-out images;
    the first tenth of the run where it has none.
    """
    total = end = 0
    sums, counts, found = np.zeros(_NARROW), np.zeros(_NARROW), [np.empty(0, dtype=np.uint32)]
    for positions, losses, levels, seen in _visits(directory):
        total, end = total + len(losses), max(end, int(positions.max()) + 1)
        sums += np.bincount(levels, losses, _NARROW)
        counts += np.bincount(levels, minlength=_NARROW)
        found.append(np.unique(seen))
    if total == 0:
        return None
    images, means = np.unique(np.concatenate(found)), sums / np.maximum(counts, 1)
    halves = np.zeros((3, 2, len(images)))  # number, sum and sum of squares of relative losses in both halves
    parts = np.zeros((3, _PARTS, _LEVELS))  # the same of differences from the means, by part of the run and level
    for positions, losses, levels, seen in _visits(directory, end, images):
        relative = np.divide(losses, means[levels], out=np.ones(len(losses)), where=means[levels] > 0)
        middles = 2 * positions + 1  # of steps, in half steps, so that a short run has a last tenth too
        _add(halves, middles // end * len(images) + np.searchsorted(images, seen), relative)
        _add(parts, middles * _PARTS // (2 * end) * _LEVELS + levels * _LEVELS // _NARROW, losses - means[levels])
    least, most, count = _ranked(images, halves)
    names, unnamed = _names(directory, {number for number, *_ in (*least, *most)})
    return Learning(
        visits=total,
        count=count,
        levels=tuple(_levels(sums, counts, parts, best_steps, end)),
        least=tuple(_image(names, *each) for each in least),
        most=tuple(_image(names, *each) for each in most),
        unnamed=unnamed,
    )


def part_of(timestep: int) -> int:
    """The timestep of the `TrainedLevel` around which another one is."""
    return round(1000 * (min(timestep * _LEVELS // 1000, _LEVELS - 1) + 0.5) / _LEVELS)


def _visits(
    directory: RunDirectory, end: int | None = None, images: NDArray[np.uint32] | None = None
) -> Iterator[tuple[Numbers, Values, Numbers, NDArray[np.uint32]]]:
    """Yields positions (V,), losses, places of noise levels among `_NARROW`, and numbers of images.

    Of positions before `end` and of these images, where they are given: a run that trains writes meanwhile.
    """
    for _, positions, records in read_visits(directory.path / FOLDER):
        if end is not None and images is not None:
            known = (positions < end) & np.isin(records["image"], images)
            positions, records = positions[known], records[known]
        if len(records):
            levels = (records["noise"].astype(np.int64) - 1) * _NARROW // NOISE_LEVELS
            yield positions, records["loss"].astype(np.float64), levels, records["image"]


def _add(table: Values, places: Numbers, values: Values) -> None:
    """Add values (V,) to a table (3, ...) of numbers, sums and sums of squares, at flat places (V,)."""
    for row, added in zip(table, (np.ones_like(values), values, values**2), strict=True):
        np.add.at(row.reshape(-1), places, added)


def _ranked(images: NDArray[np.uint32], halves: Values) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]], int]:
    """Numbers of images with what `TrainedImage` has: the least learned, the most learned; and how many are compared.

    The spread of one image's visits is taken to be the same for all, because most have few.
    """
    chosen = halves[0, 1] > 0
    (first_count, count), (first_sum, total), (_, squares) = halves[:, :, chosen]
    mean, degrees = total / count, float((count - 1).sum())
    spread = math.sqrt(max(0.0, float((squares - total * mean).sum())) / degrees) if degrees else math.nan
    interval = 1.96 * spread / np.sqrt(count)
    first = np.divide(first_sum, first_count, out=np.full(len(mean), math.nan), where=first_count > 0)
    margin = np.nan_to_num(interval)
    columns = np.stack([images[chosen], first_count + count, first, mean, interval], 1)
    least, most = np.argsort(margin - mean, kind="stable")[:MOST], np.argsort(mean + margin, kind="stable")[:MOST]
    return columns[least].tolist(), columns[most].tolist(), len(mean)


def _levels(sums: Values, counts: Values, parts: Values, best_steps: Mapping[int, int], end: int) -> Iterator[TrainedLevel]:
    overall = sums.reshape(_LEVELS, -1).sum(1) / np.maximum(1, counts.reshape(_LEVELS, -1).sum(1))
    for place, mean in enumerate(overall):
        timestep = round(1000 * (place + 0.5) / _LEVELS)

        def window(begin: int, place: int = place) -> tuple[float, float, float]:
            """Number of visits, mean difference and its squared standard error in a tenth of the run."""
            number, total, squares = parts[:, begin : begin + _WINDOW, place].sum(1).tolist()
            difference = total / max(1.0, number)
            return number, difference, max(0.0, squares - total * difference) / max(1.0, number * (number - 1))

        best = best_steps.get(timestep, 1)
        begin = min(_PARTS * max(0, best - 1) // end, _PARTS)
        first, since, last = window(0), window(begin), window(_PARTS - _WINDOW)
        if first[0] == 0 or last[0] == 0:
            continue
        change = None
        if begin + 2 * _WINDOW <= _PARTS and min(since[0], last[0]) > 1:
            interval = 1.96 * math.sqrt(since[2] + last[2])
            change = Change(since=best, loss=last[1] - since[1], interval=interval)
        yield TrainedLevel(
            timestep=timestep,
            visits=int(parts[0, :, place].sum()),
            first=float(mean) + first[1],
            last=float(mean) + last[1],
            change=change,
        )


def _image(
    names: Mapping[int, tuple[str, str]], number: float, visits: float, first: float, last: float, interval: float
) -> TrainedImage:
    dataset, key = names.get(int(number), ("", f"{int(number):08x}"))
    return TrainedImage(
        dataset=dataset,
        key=key,
        visits=int(visits),
        first=None if math.isnan(first) else first,
        last=last,
        interval=None if math.isnan(interval) else interval,
    )


def _names(directory: RunDirectory, numbers: Set[float]) -> tuple[dict[int, tuple[str, str]], str]:
    """Dataset and key of images by number, from the indexes of the run; why some are not known, "" if all are.

    An image that was replaced or removed since is not in an index.
    """
    found: dict[int, tuple[str, str]] = {}
    try:
        plugins = load_plugins(selection_of((), directory.config_file, os.environ))
        config = resolve(schema_of(plugins), (), file=directory.config_file, environment={})
        for spec in dataset_specs(config, catalog_of(plugins)):
            if spec.dataset_type == "image":
                for key in load_index(spec, directory.data / f"{spec.file_name}.arrow").keys():  # noqa: SIM118 - no dict
                    if (number := image_number(f"{spec.id}/{key}")) in numbers:
                        found[number] = spec.id, key
    except UserError as error:
        return found, error.message
    missing = len(numbers) - len(found)
    return found, f"{missing} of them are not in the indexes of the run any more" if missing else ""
