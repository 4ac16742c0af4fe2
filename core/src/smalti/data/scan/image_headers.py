"""The size of an image, and a digest of its content, from the first bytes of its file, without decoding it."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image

from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.protocol import Storage

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
)
"""File names that are taken for images, in any case."""

MAX_PIXELS = 89_478_485
"""Pixels. More than this (Pillow's own warning level) is taken for a decompression bomb."""

# What Pillow's decoders raise for files that are not what they say.
DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

_HEAD = 64 * 1024
_ORIENTATION = 0x0112
_SWAPPED = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the beginning of an image's file tells.

    Width and height are those of the image as it is seen, that is after its EXIF rotation. `content` is a digest of the first
    64 KiB, 64 bits as a signed number and never 0: with the size of the file it tells an image that was replaced from one that
    was merely copied or touched.
    """

    width: int
    height: int
    content: int


def read_header(storage: Storage, key: str, size: int) -> Header:
    """`size` is that of the file in bytes. Reads 64 KiB, and the whole file only when its header is longer.

    Raises BadSampleError, or a StorageError.
    """
    head = storage.read_range(key, 0, _HEAD)
    content = int.from_bytes(blake3(head).digest(length=8), "little", signed=True) or 1
    try:
        width, height = _size(head)
    except BadSampleError:
        if size <= _HEAD:
            raise
        width, height = _size(storage.read(key))
    return Header(width=width, height=height, content=content)


def open_image(data: bytes) -> Image.Image:
    """The image in a file, not decoded yet. Raises BadSampleError when it is none, or far too large."""
    try:
        image = Image.open(io.BytesIO(data))
    except DECODING_ERRORS as error:
        raise BadSampleError(f"not a readable image: {_reason(error)}") from error
    if image.width * image.height > MAX_PIXELS:
        raise BadSampleError(f"{image.width}x{image.height} is more than {MAX_PIXELS // 1_000_000} megapixels: scale it down")
    return image


def orientation(image: Image.Image) -> int:
    """The EXIF orientation that is left to apply to size and pixels, 1 to 8; 1 if there is none."""
    if image.format == "TIFF":
        return 1  # Pillow applies it by itself, to the size when it opens and to the pixels when it loads
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # asking further would decode the image, to look behind it
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except DECODING_ERRORS:
        return 1  # a damaged EXIF block is no reason to give the image up
    return value if value in range(1, 9) else 1


def _size(data: bytes) -> tuple[int, int]:
    with open_image(data) as image:
        width, height = image.size
        return (height, width) if orientation(image) in _SWAPPED else (width, height)


def _reason(error: Exception) -> str:
    # Pillow's own text for an unknown file names the buffer object and nothing else.
    return "unknown format" if "cannot identify" in str(error) else (str(error) or type(error).__name__)
