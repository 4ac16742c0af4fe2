"""Which images have a colour profile that matters: earlier versions ignored it, so their latents of such images are wrong."""

from __future__ import annotations

import io

from PIL import Image

from smalti.data import BadSampleError, Dataset, StorageError, TransientStorageError, srgb_transform

_HEAD = 64 * 1024
"""Bytes that are read of a file first."""
_PROFILE_BEFORE_PIXELS = ("JPEG", "MPO", "PNG")


def is_srgb(dataset: Dataset, row: int) -> bool:
    """Whether decoding an image converts no colours. True also for one that cannot be read. Called from several threads."""
    index = dataset.index
    key, place = index.key(row), index.place(row)
    try:
        head = dataset.source.read_range(place, 0, _HEAD) if place else dataset.storage.read_range(key, 0, _HEAD)
        found = _is_srgb(head, whole=len(head) < _HEAD)
        return bool(_is_srgb(dataset.read(row), whole=True) if found is None else found)
    except TransientStorageError:
        raise
    except (BadSampleError, StorageError):
        return True


def _is_srgb(data: bytes, *, whole: bool) -> bool | None:
    """None if these bytes do not tell, because they are only the beginning of a file."""
    try:
        image = Image.open(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - whatever Pillow raises for damaged or incomplete files
        return True if whole else None
    if whole or image.format in _PROFILE_BEFORE_PIXELS:
        return srgb_transform(image.info.get("icc_profile"), image.mode) is None
    return None
