"""Decode images into pixels for a model.

Shapes: B images, H, W pixels, 3 colours (red, green, blue).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageCms
from torch import Tensor

from smalti.data.buckets import Bucket
from smalti.data.dataset import Sample
from smalti.data.scan.image_sizes import DECODING_ERRORS, open_image, orientation
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.protocol import StorageError, TransientStorageError

_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

# How to undo each EXIF orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(sample: Sample, bucket: Bucket) -> Bytes:
    """`decode` of the file of a sample. Raises BadSampleError also for one that is missing, may not be read, or has changed."""
    try:
        data = sample.dataset.read(sample.row)
    except TransientStorageError:
        raise
    except StorageError as error:
        raise BadSampleError(error.message) from error
    was_opened = sample.dataset.index.content(sample.row) != 0  # a table may have other sizes than the files

    def scaled(width: int, height: int) -> tuple[int, int]:
        if was_opened and (width, height) != sample.size:
            raise BadSampleError(f"its size is {width}x{height}, and was {'x'.join(map(str, sample.size))} when it was scanned")
        return sample.crop_settings.resized(width, height, bucket)

    return decode(data, scaled)


def decode(data: bytes, scaled: Callable[[int, int], tuple[int, int]]) -> Bytes:
    """An image as (3, H, W) bytes: upright, sRGB on white, of the width and height that `scaled` makes of its own; not cropped.

    Raises BadSampleError for anything but a complete, readable image.
    """
    with open_image(data) as image:
        turn = orientation(image)
        width, height = image.size if turn < 5 else image.size[::-1]
        target = scaled(width, height)
        # A JPEG can be decoded at a fraction of its size; twice the target leaves the quality to the filter below.
        image.draft(None, (2 * max(target), 2 * max(target)))
        try:
            turned = upright(image)
            to_srgb = srgb_transform(image.info.get("icc_profile"), image.mode)
            flat = turned if to_srgb and image.mode == "CMYK" else on_white(turned)
            if flat.size != target:
                flat = flat.resize(target, Image.Resampling.LANCZOS)
            rgb = to_srgb.apply(flat.convert(to_srgb.inputMode)) if to_srgb else flat
        except DECODING_ERRORS as error:
            raise BadSampleError(f"the image is damaged: {error or type(error).__name__}") from error
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def upright(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation says that it is seen."""
    turn = orientation(image)
    return image.transpose(_UPRIGHT[turn]) if turn in _UPRIGHT else image


def on_white(image: Image.Image) -> Image.Image:
    """Convert any image to RGB; transparent areas become white, 16 bits become 8."""
    if image.mode == "F":
        raise BadSampleError("pixels are floating-point numbers, whose range is not known: convert the image")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        cover = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", cover.size, "white"), cover).convert("RGB")
    return image.convert("RGB")


@lru_cache(maxsize=32)
def srgb_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The conversion to sRGB of an image in Pillow's `mode` with an ICC profile, from its `inputMode`.

    None without a profile, for one that is as good as sRGB, and for one that cannot be used, which is logged once.
    """
    if not profile:
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        is_grey = source.profile.xcolor_space == "GRAY" and Image.getmodebase(mode) == "L"
        own = "CMYK" if mode == "CMYK" else "L" if is_grey else "RGB"
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), own, "RGB")
    except (ImportError, OSError, ImageCms.PyCMSError) as error:
        _log.warning("a colour profile is ignored, because it cannot be used for an image of mode %s: %s", mode, error)
        return None
    sample = Image.fromarray((np.indices((6, 6, 6)).T * 51).astype(np.uint8).reshape(36, 6, 3)).convert(own)
    changes = ImageChops.difference(transform.apply(sample), sample.convert("RGB")).getextrema()
    return transform if np.max(changes) > 2 else None  # profiles of sRGB differ by rounding


def crop(image: Bytes, bucket: Bucket, offset: tuple[int, int]) -> Bytes:
    """Crop a scaled image to its bucket (3, H, W), as a view. `offset`: left and top, from `CropSettings.offset`."""
    left, top = offset
    return image[:, top : top + bucket.height, left : left + bucket.width]


def mirrored(image: Bytes, bucket: Bucket, offset: tuple[int, int]) -> tuple[Bytes, tuple[int, int]]:
    """Crop a scaled image like `crop`, and mirror the result; returns also its left and top in the mirrored scaled image."""
    left, top = offset
    return crop(image, bucket, offset)[:, :, ::-1], (image.shape[2] - bucket.width - left, top)


def normalised(images: Tensor) -> Tensor:
    """Returns bytes as fp32 in [-1, 1], on the same device; 0 is -1 and 255 is 1."""
    return images.to(torch.float32).div_(127.5).sub_(1.0)
