"""The rows of a dataset by bucket: a file of row numbers, 4 bytes each, that every rank maps into memory.

It is kept beside the index and made again when the index or a setting that determines buckets changes. Making it takes two
passes over the sizes in the index; opening it costs the same for any number of rows.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from smalti.data.buckets import REFUSED, Bucket, CropSettings, choices_of
from smalti.data.scan.index import DatasetIndex
from smalti.errors import PreflightError
from smalti.system import load_json, open_regular

Rows = NDArray[np.uint32]

MOST_ROWS = 2**32 - 1
"""Of one dataset, since a row number has 4 bytes."""
_CHUNK = 1 << 20  # rows sorted at once
_NONE = 0xFFFF  # no bucket
_MOST_BUCKETS = 30_000  # so that their numbers fit into signed 16 bits
_FORMAT = 1
_ENDING = b"smalti.bucket.rows"
_log = logging.getLogger(__name__)
_WITHOUT_EFFECT = ("crop_style", "maximum_image_size", "target_downsample_size")
"""Crop settings that do not determine the bucket."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketRows:
    """The rows of one bucket, ascending, and their digest in hexadecimal."""

    bucket: Bucket
    rows: Rows
    digest: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsByBucket:
    """The usable rows of a dataset. `left_out` counts images that the crop settings do not accept."""

    buckets: tuple[BucketRows, ...]
    left_out: int


def rows_by_bucket(index: DatasetIndex, settings: CropSettings, path: Path | None) -> RowsByBucket:
    """Returns the rows of each bucket, sorted by bucket, from the file at `path` if it is of this index and these settings.

    Otherwise it is made, and replaced as a whole, so that several processes may do so at once. With None, and where nothing can
    be written, the rows are kept in memory.
    """
    if len(index) > MOST_ROWS:
        raise PreflightError(
            f"dataset {index.dataset} has {len(index):,} images, and one dataset has at most {MOST_ROWS:,}",
            fix="divide it into several datasets",
        )
    key = _key(index, settings)
    if path is None:
        return _in_memory(index, settings)
    if (found := _open(path, key)) is not None:
        return found
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w+b") as file:
            _write(file, index, settings, key, draft.with_name(f"{draft.name}.buckets"))
        draft.replace(path)
        if (found := _open(path, key)) is not None:
            return found
    except OSError as error:
        _log.warning("the rows by bucket of dataset %s are kept in memory: %s", index.dataset, error)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return _in_memory(index, settings)


def known_buckets(index: DatasetIndex, settings: CropSettings, path: Path) -> tuple[Bucket, ...]:
    """The buckets that have images, from the file at `path` if it is of this index and these settings. Writes nothing."""
    found = _open(path, _key(index, settings))
    return tuple(each.bucket for each in (found or _in_memory(index, settings)).buckets)


def _key(index: DatasetIndex, settings: CropSettings) -> str:
    fields = {name: value for name, value in asdict(settings).items() if name not in _WITHOUT_EFFECT}
    values = {"format": _FORMAT, "rows": len(index), "content": index.digests.content, "settings": fields}
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _open(path: Path, key: str) -> RowsByBucket | None:
    """Returns what a file holds; None if there is none, or it is of another key."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_ENDING) - 8))
            length, ending = int.from_bytes(file.read(8), "little"), file.read()
            if ending != _ENDING or length > size:
                return None
            file.seek(size - len(_ENDING) - 8 - length)
            summary: dict[str, Any] = load_json(file.read(length))
            if summary["key"] != key:
                return None
            total = sum(count for _, _, count, _ in summary["buckets"])
            # An empty file cannot be mapped. `asarray` leaves out the class memmap, which makes indexing slow.
            rows = np.asarray(np.memmap(file, np.uint32, "r", shape=(total,))) if total else np.zeros(0, np.uint32)
    except (OSError, ValueError, KeyError):
        return None
    return _described(summary, rows)


def _described(summary: dict[str, Any], rows: Rows) -> RowsByBucket:
    buckets, start = [], 0
    for width, height, count, digest in summary["buckets"]:
        buckets.append(BucketRows(bucket=Bucket(width, height), rows=rows[start : start + count], digest=digest))
        start += count
    return RowsByBucket(buckets=tuple(buckets), left_out=summary["left_out"])


def _in_memory(index: DatasetIndex, settings: CropSettings) -> RowsByBucket:
    numbers = np.empty(len(index), dtype=np.uint16)
    buckets = _Buckets(settings)
    buckets.assign(index, numbers)
    rows = np.empty(int(buckets.counts.sum()), dtype=np.uint32)
    return _described(_grouped(buckets, numbers, rows), rows)


def _write(file: BinaryIO, index: DatasetIndex, settings: CropSettings, key: str, scratch: Path) -> None:
    """Write rows, summary, its length and the ending. `scratch` is a file for the bucket of each row, removed afterwards."""
    buckets = _Buckets(settings)
    try:
        numbers: NDArray[np.uint16] = np.memmap(scratch, np.uint16, "w+", shape=(max(1, len(index)),))
        buckets.assign(index, numbers)
        total = int(buckets.counts.sum())
        rows: Rows = np.memmap(cast(Any, file), np.uint32, "w+", shape=(total,)) if total else np.zeros(0, np.uint32)
        summary = _grouped(buckets, numbers[: len(index)], rows)
        if isinstance(rows, np.memmap):
            rows.flush()
        del numbers, rows
    finally:
        scratch.unlink(missing_ok=True)
    text = json.dumps({"key": key, **summary}).encode()
    file.seek(0, os.SEEK_END)
    file.write(text + len(text).to_bytes(8, "little") + _ENDING)
    file.flush()
    os.fsync(file.fileno())


def _grouped(buckets: _Buckets, numbers: NDArray[np.uint16], rows: Rows) -> dict[str, Any]:
    """Fill `rows` by bucket, ascending within each; returns the summary."""
    numbers_of, counts = sorted(buckets.numbers.items()), buckets.counts
    order = [number for _, number in numbers_of]
    free = np.zeros(len(order), dtype=np.int64)
    free[order] = np.cumsum(counts[order]) - counts[order]
    starts = free.copy()
    for start in range(0, len(numbers), _CHUNK):
        chunk = np.asarray(numbers[start : start + _CHUNK])
        by_bucket = np.argsort(chunk, kind="stable")  # of 16 bits: a radix sort
        here, taken = np.bincount(chunk, minlength=len(order)), 0
        for number in np.flatnonzero(here[: len(order)]).tolist():
            count = int(here[number])
            rows[free[number] : free[number] + count] = start + by_bucket[taken : taken + count]
            free[number], taken = free[number] + count, taken + count
    described = []
    for bucket, number in numbers_of:
        digest = blake3()
        for start in range(int(starts[number]), int(free[number]), _CHUNK):
            digest.update(np.ascontiguousarray(rows[start : min(start + _CHUNK, int(free[number]))]).view(np.uint8).data)
        described.append([bucket.width, bucket.height, int(counts[number]), digest.hexdigest()])
    return {"buckets": described, "left_out": buckets.left_out}


class _Buckets:
    """Numbers of the buckets of a dataset. The rule is applied to one image of each class of sizes."""

    def __init__(self, settings: CropSettings) -> None:
        self.numbers: dict[Bucket, int] = {}
        self.counts = np.zeros(_NONE, dtype=np.int64)
        """Rows of each number."""
        self.left_out = 0
        self._settings = settings
        self._of_class = {REFUSED: _NONE}

    def assign(self, index: DatasetIndex, numbers: NDArray[np.uint16]) -> None:
        """Fill `numbers` with the bucket of each row."""
        choosing = self._settings.choices > 1
        for batch in index.batches("width", "height", *(["size"] if choosing else [])):
            widths, heights = (batch.columns[name].to_numpy().astype(np.int64) for name in ("width", "height"))
            choices = choices_of(batch.columns["size"].to_numpy(), widths, heights) if choosing else np.zeros_like(widths)
            classes = self._settings.classes(widths, heights, choices)
            _, rows, places = np.unique(classes, return_index=True, return_inverse=True)
            images = (each[rows].tolist() for each in (classes, widths, heights, choices))
            found = np.array([self._number(*image) for image in zip(*images, strict=True)], dtype=np.uint16)[places]
            self.counts += np.bincount(found, minlength=_NONE + 1)[:_NONE]
            self.left_out += int(np.count_nonzero((found == _NONE) & (widths > 0)))
            numbers[batch.start : batch.start + len(found)] = found

    def _number(self, image_class: int, width: int, height: int, choice: int) -> int:
        """The number of the bucket of a class, which this image is of."""
        if image_class not in self._of_class:
            bucket = self._settings.bucket(width, height, choice)
            self._of_class[image_class] = self.numbers.setdefault(bucket, len(self.numbers))
            if len(self.numbers) > _MOST_BUCKETS:
                message = f"the images of a dataset are of more than {_MOST_BUCKETS:,} buckets"
                raise PreflightError(message, fix="raise --aspect_bucket_alignment")
        return self._of_class[image_class]
