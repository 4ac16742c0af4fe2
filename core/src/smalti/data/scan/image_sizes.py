"""The size of an image, and a digest of its content, from a few bytes of its file, without decoding it.

Pillow needs all of a WebP, AVIF or TIFF file to open it. Here a first read of 16 KiB is enough for most files. Where a header
is longer, or EXIF data is behind the pixels, further reads hop there. Formats: JPEG (ITU T.81, EXIF 2.3), PNG, TIFF 6, GIF,
BMP, WebP (RFC 9649), AVIF (ISO 14496-12, 23008-12). A file that is not understood completely is left to Pillow.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image

from smalti.data.scan.quarantine import BadSampleError

Read = Callable[[int, int], bytes]
"""(start, length) -> the bytes of a file; fewer at its end."""

FIRST_READ = 16 * 1024
"""Bytes. A request costs more than its bytes, and the headers of most files are shorter."""
_NEXT_READ = 4 * 1024
_MAX_READS = 12
_MAX_ENTRIES = 1000  # of a TIFF directory, or properties of an AVIF item
_SWAPPED = (5, 6, 7, 8)  # values of the EXIF orientation that swap width and height
_WIDTH, _HEIGHT, _ORIENTATION = 0x100, 0x101, 0x112
_IN_XMP = re.compile(rb"tiff:Orientation(?:=\"|>)([0-9])")


class UnknownLayoutError(Exception):
    """The size cannot be read here. The file may still be an image."""


class Window:
    """Bytes of a file by offset, read when they are needed. `head` is the beginning of the file."""

    def __init__(self, head: bytes, size: int, read: Read) -> None:
        self.size = size
        self._parts = [(0, head)]
        self._read = read

    def at(self, start: int, length: int) -> bytes:
        """Raises UnknownLayoutError behind the end of the file, and when too many reads would be needed."""
        for first, part in self._parts:
            if first <= start and start + length <= first + len(part):
                return part[start - first : start - first + length]
        if start + length > self.size or len(self._parts) == _MAX_READS:
            raise UnknownLayoutError("its header is truncated or scattered")
        part = self._read(start, min(max(length, _NEXT_READ), self.size - start))
        if len(part) < length:
            raise UnknownLayoutError("it is shorter than listed")
        self._parts.append((start, part))
        return part[:length]

    def numbers(self, layout: str, start: int) -> tuple[int, ...]:
        """Whole numbers in a layout of `struct`."""
        return struct.unpack(layout, self.at(start, struct.calcsize(layout)))


def size_of(file: Window) -> tuple[int, int]:
    """Returns width and height in pixels after EXIF rotation. Raises UnknownLayoutError."""
    start = file.at(0, 16)
    try:
        width, height, orientation = _reader_of(start)(file)
    except struct.error as error:
        raise UnknownLayoutError(str(error)) from error
    if width < 1 or height < 1:
        raise UnknownLayoutError(f"its size is {width}x{height}")
    return (height, width) if orientation in _SWAPPED else (width, height)


Size = tuple[int, int, int]
"""Width and height as they are stored, and the EXIF orientation."""


def _reader_of(start: bytes) -> Callable[[Window], Size]:
    if start[:3] == b"\xff\xd8\xff":
        return _jpeg
    if start[:8] == b"\x89PNG\r\n\x1a\n":
        return _png
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return _webp
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis"):
        return _avif
    if start[:4] in (b"II*\0", b"MM\0*"):
        return _tiff
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return lambda file: (*_pair(file.numbers("<HH", 6)), 1)
    if start[:2] == b"BM":
        return _bmp
    raise UnknownLayoutError("its first bytes are those of no format")


def _jpeg(file: Window) -> Size:
    at, in_exif, in_xmp = 2, 0, 0
    while True:
        mark, kind, length = file.numbers(">BBH", at)
        if mark != 0xFF:
            raise UnknownLayoutError("a JPEG segment does not begin with a marker")
        if kind == 0xFF:  # padding before a marker
            at += 1
            continue
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # start of frame
            height, width = file.numbers(">HH", at + 5)
            return width, height, in_exif or in_xmp or 1
        if kind == 0xE1 and length > 8 and file.at(at + 4, 6) == b"Exif\0\0":
            if in_exif:
                raise UnknownLayoutError("EXIF data in several segments")
            in_exif = _exif(file, at + 10)
        elif kind == 0xE1 and length > 31 and file.at(at + 4, 29) == b"http://ns.adobe.com/xap/1.0/\0":
            in_xmp = _xmp(file.at(at + 33, length - 31))
        elif kind in (0xD9, 0xDA):  # end of image, or pixels
            raise UnknownLayoutError("a JPEG file without a frame")
        at += 2 + length


def _png(file: Window) -> Size:
    if file.at(12, 4) != b"IHDR":
        raise UnknownLayoutError("a PNG file without its header")
    width, height = file.numbers(">II", 16)
    at = 33
    while True:
        header = file.at(at, 8)
        length, name = int.from_bytes(header[:4], "big"), header[4:]
        if name in (b"IDAT", b"IEND"):  # EXIF data behind the pixels is not used
            return width, height, 1
        if name == b"eXIf":
            if not (orientation := _exif(file, at + 8)):
                raise UnknownLayoutError("EXIF data without an orientation; XMP may have it")
            return width, height, orientation
        if name in (b"tEXt", b"zTXt", b"iTXt") and file.at(at + 8, min(16, length)).startswith(b"Raw profile type"):
            raise UnknownLayoutError("EXIF data as text")
        at += 12 + length


def _webp(file: Window) -> Size:
    kind = file.at(12, 4)
    if kind == b"VP8 " and file.at(23, 3) == b"\x9d\x01\x2a":
        width, height = file.numbers("<HH", 26)
        return width & 0x3FFF, height & 0x3FFF, 1
    if kind == b"VP8L" and file.at(20, 1) == b"\x2f":
        packed = file.numbers("<I", 21)[0]
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1, 1
    if kind != b"VP8X":
        raise UnknownLayoutError("a WebP file of an unknown kind")
    features = file.at(20, 10)
    width, height = (int.from_bytes(features[first : first + 3], "little") + 1 for first in (4, 7))
    chunks = _webp_chunks(file) if features[0] & 0b1100 else {}
    in_exif = in_xmp = 0
    if b"EXIF" in chunks:
        start, _ = chunks[b"EXIF"]
        in_exif = _exif(file, start + (6 if file.at(start, 6) == b"Exif\0\0" else 0))
    if not in_exif and b"XMP " in chunks:
        in_xmp = _xmp(file.at(*chunks[b"XMP "]))
    return width, height, in_exif or in_xmp or 1


def _webp_chunks(file: Window) -> dict[bytes, tuple[int, int]]:
    """Start and length of the chunks behind the header, by name."""
    chunks, at = {}, 30
    while at + 8 <= file.size:
        header = file.at(at, 8)
        length = int.from_bytes(header[4:], "little")
        chunks[header[:4]] = at + 8, length
        at += 8 + length + length % 2
    return chunks


def _bmp(file: Window) -> Size:
    header = file.numbers("<I", 14)[0]
    if header == 12:
        return (*_pair(file.numbers("<HH", 18)), 1)
    if header < 40:
        raise UnknownLayoutError("a BMP file of an unknown kind")
    width, height = file.numbers("<ii", 18)
    return width, abs(height), 1  # a negative one: the rows are from top to bottom


def _tiff(file: Window) -> Size:
    found = _directory(file, 0)
    if not {_WIDTH, _HEIGHT} <= found.keys():
        raise UnknownLayoutError("a TIFF file without a size")
    return found[_WIDTH], found[_HEIGHT], found.get(_ORIENTATION, 1)


def _exif(file: Window, start: int) -> int:
    """Returns the orientation in EXIF data, 1 for an undefined one; 0 if it has none."""
    value = _directory(file, start).get(_ORIENTATION)
    return 0 if value is None else value if value in range(1, 9) else 1


def _directory(file: Window, start: int) -> dict[int, int]:
    """Size and orientation in the first directory of a TIFF structure."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(file.at(start, 4))
    if order is None:
        raise UnknownLayoutError("EXIF data of an unknown kind")
    at = start + file.numbers(order + "I", start + 4)[0]
    count = file.numbers(order + "H", at)[0]
    if count > _MAX_ENTRIES:
        raise UnknownLayoutError("a directory of too many entries")
    found: dict[int, int] = {}
    file.at(at, 2 + 12 * count)  # in one read
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values = file.numbers(order + "HHI", entry)
        if tag in (_WIDTH, _HEIGHT, _ORIENTATION):
            if values != 1 or kind not in (3, 4):
                raise UnknownLayoutError("a number of an unknown type")
            found[tag] = file.numbers(order + "xxxxxxxx" + "-HI"[kind - 2], entry)[0]
    return found


def _xmp(text: bytes) -> int:
    """Returns the orientation in XMP data; 0 if it has none."""
    found = _IN_XMP.search(text)
    value = int(found[1]) if found else 0
    return value if value in range(9) else 1


def _avif(file: Window) -> Size:
    """The properties of the primary item: its size, and how it is rotated and mirrored."""
    meta = next((found for name, *found in _boxes(file, 0, file.size) if name == b"meta"), None)
    if meta is None:
        raise UnknownLayoutError("an AVIF file without metadata")
    primary, properties, used = -1, list[tuple[bytes, int]](), dict[int, list[int]]()
    for name, start, end in _boxes(file, meta[0] + 4, meta[1]):
        if name == b"pitm":
            primary = file.numbers(">H" if file.at(start, 1) == b"\0" else ">I", start + 4)[0]
        elif name == b"iinf" and b"mime" in file.at(start, end - start):
            raise UnknownLayoutError("XMP data, which may have an orientation")
        elif name == b"iprp":
            for part, first, last in _boxes(file, start, end):
                if part == b"ipco":
                    properties = [(one, where) for one, where, _ in _boxes(file, first, last)]
                elif part == b"ipma":
                    used = _associations(file, first)
    chosen = dict(properties[number - 1] for number in used.get(primary, ()) if 0 < number <= len(properties))
    if b"ispe" not in chosen:
        raise UnknownLayoutError("an AVIF file without a size")
    width, height = file.numbers(">II", chosen[b"ispe"] + 4)
    quarters = file.at(chosen[b"irot"], 1)[0] & 3 if b"irot" in chosen else 0
    return width, height, 6 if quarters % 2 else 1


def _associations(file: Window, start: int) -> dict[int, list[int]]:
    """The numbers, from 1, of the properties of each item."""
    version, flags = file.at(start, 4)[0], file.at(start, 4)[3]
    item, number = (">I" if version else ">H"), (">H" if flags & 1 else ">B")
    count = file.numbers(">I", start + 4)[0]
    at, used = start + 8, dict[int, list[int]]()
    if count > _MAX_ENTRIES:
        raise UnknownLayoutError("an AVIF file of too many items")
    for _ in range(count):
        name = file.numbers(item, at)[0]
        at += struct.calcsize(item)
        length, at = file.at(at, 1)[0], at + 1
        numbers = [file.numbers(number, at + place * struct.calcsize(number))[0] for place in range(length)]
        used[name] = [value & (0x7FFF if flags & 1 else 0x7F) for value in numbers]
        at += length * struct.calcsize(number)
    return used


def _boxes(file: Window, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields the name of each box, and where its content starts and ends."""
    while at + 8 <= end:
        length, header = file.numbers(">I", at)[0], 8
        if length == 1:
            length, header = file.numbers(">Q", at + 8)[0], 16
        elif length == 0:
            length = end - at
        if length < header:
            raise UnknownLayoutError("a box that is shorter than its header")
        yield file.at(at + 4, 4), at + header, min(at + length, end)
        at += length


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    first, second = numbers
    return first, second


EXTENSIONS = frozenset((".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"))
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
        # Pillow's own text for an unknown file names the buffer object and nothing else.
        reason = "unknown format" if "cannot identify" in str(error) else str(error) or type(error).__name__
        raise BadSampleError(f"not a readable image: {reason if data else 'empty file'}") from error
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
        return image.size[::-1] if orientation(image) in _SWAPPED else image.size
