"""The size of an image, and a digest of its content, from a few bytes of its file, without decoding it."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image

from smalti.data.scan.image_sizes import FIRST_READ, Read, UnknownLayoutError, Window, size_of
from smalti.data.scan.quarantine import BadSampleError

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
)
"""File name extensions of images, in any case."""

MAX_PIXELS = 89_478_485
"""Pixels. More than this (Pillow's own warning level) is treated as a decompression bomb."""

# What Pillow's decoders raise for damaged files.
DECODING_ERRORS = (
    OSError,
    RuntimeError,  # of libavif
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

# Of damaged metadata: one for each file and tag, without the name of the file. An image that cannot be used is listed anyway.
warnings.filterwarnings("ignore", module=r"PIL\.")

_ORIENTATION = 0x0112
_SWAPPED = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Size and digest of an image.

    Width and height are those after EXIF rotation. `content` is a digest of the first 16 KiB, 64 bits as a signed number and
    never 0: with the size of the file it distinguishes an image that was replaced from one that was only copied or touched.
    """

    width: int
    height: int
    content: int


def read_header(read: Read, size: int) -> Header:
    """Read an image header. `read` returns bytes of the file from an offset on, `size` is that of the file.

    Reads 16 KiB, and a few times 4 KiB if the header is longer or EXIF data is elsewhere. A file that `image_sizes` does not
    understand is read whole. Raises BadSampleError, or a StorageError.
    """
    head = read(0, FIRST_READ)
    content = int.from_bytes(blake3(head).digest(length=8), "little", signed=True) or 1
    try:
        width, height = size_of(Window(head, max(size, len(head)), read))
    except UnknownLayoutError:
        width, height = _size(head if size <= len(head) else read(0, size))
    check_pixels(width, height)
    return Header(width=width, height=height, content=content)


def open_image(data: bytes) -> Image.Image:
    """Open an image without decoding it. Raises BadSampleError for another file, or a far too large image."""
    try:
        image = Image.open(io.BytesIO(data))
    except DECODING_ERRORS as error:
        raise BadSampleError(f"not a readable image: {_reason(error)}") from error
    check_pixels(*image.size)
    return image


def check_pixels(width: int, height: int) -> None:
    """Raises BadSampleError for a far too large image."""
    if width * height > MAX_PIXELS:
        raise BadSampleError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} megapixels: reduce its size")


def orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation that remains to be applied to size and pixels, 1 to 8; 1 if there is none."""
    if image.format == "TIFF":
        return 1  # Pillow applies it: to the size on opening, to the pixels on loading
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif would decode the image, to read what follows it
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except DECODING_ERRORS:
        return 1  # a damaged EXIF block does not make the image unusable
    return value if value in range(1, 9) else 1


def _size(data: bytes) -> tuple[int, int]:
    with open_image(data) as image:
        width, height = image.size
        return (height, width) if orientation(image) in _SWAPPED else (width, height)


def _reason(error: Exception) -> str:
    # Pillow's own text for an unknown file names the buffer object and nothing else.
    return "unknown format" if "cannot identify" in str(error) else (str(error) or type(error).__name__)
