"""What the headers of images do not say: files that are damaged behind them, and held-out images that are trained on."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from smalti.data import BadSampleError, Dataset, Progress, Quarantined, StorageError, Threads, TransientStorageError

_TOGETHER = 1024
"""Images whose decoding is queued at once."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


def damaged_images(dataset: Dataset, progress: Progress | None = None) -> Iterator[Quarantined]:
    """Decodes every image that the scan found usable; yields those that are damaged, with the reason, in order of rows."""
    total = len(dataset.index)
    with Threads(os.cpu_count() or 1, "smalti-decode") as pool:
        for start in range(0, total, _TOGETHER):
            rows = [row for row in range(start, min(start + _TOGETHER, total)) if dataset.index.size(row)[0]]
            for row, reason in zip(rows, pool.map(partial(_problem, dataset), rows), strict=True):
                if reason:
                    yield Quarantined(dataset=dataset.spec.id, key=dataset.index.key(row), reason=reason)
            if progress:
                progress(min(start + _TOGETHER, total), total)


def _problem(dataset: Dataset, row: int) -> str:
    """Why an image cannot be decoded; "" if it can be."""
    try:
        data = dataset.read(row)
    except TransientStorageError:
        raise
    except (BadSampleError, StorageError) as error:
        return str(error)
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # noqa: BLE001 - whatever Pillow's decoders raise for damaged files
        return f"the image is damaged: {error or type(error).__name__}"
    return ""


def trained_on(training: Sequence[Dataset], held_out: Sequence[Dataset]) -> dict[str, str]:
    """Held-out images that are also images of training, wherever they are: DATASET/KEY of both.

    Compared are the size of the file and the digest of its first 16 KiB; images that the scan did not open are left out.
    """
    found: dict[str, str] = {}
    for other in held_out:
        for mine in other.index.batches("content", "size", "key"):
            for one in training:
                for its in one.index.batches("content", "size", "key"):
                    _, rows, same = np.intersect1d(_digests(mine.columns), _digests(its.columns), return_indices=True)
                    for row, place in zip(rows.tolist(), same.tolist(), strict=True):
                        if mine.columns["content"][row].as_py():
                            image = f"{one.spec.id}/{its.columns['key'][place]}"
                            found.setdefault(f"{other.spec.id}/{mine.columns['key'][row]}", image)
    return found


def _digests(columns: dict[str, pa.Array]) -> NDArray[np.uint64]:
    """Numbers that are equal for images of the same digest and size."""
    content, size = (columns[name].to_numpy().astype(np.uint64) for name in ("content", "size"))
    return np.where(content == 0, 0, content ^ (size * _ODD))
