"""Sizes from headers are those that Pillow finds in the whole file, from a few requests."""

import io
import random
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from smalti.data.scan.image_sizes import FIRST_READ, UnknownLayoutError, Window, open_image, orientation, size_of
from smalti.data.scan.quarantine import BadSampleError

NOISE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
LARGE = np.random.default_rng(1).integers(0, 256, (300, 400, 3), dtype=np.uint8)
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def encoded(kind: str, pixels: np.ndarray = NOISE, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def exif(value: int, *, little: bool = True, note: int = 0) -> bytes:
    block = Image.Exif()
    block.endian = "<" if little else ">"
    block[0x0112] = value
    if note:
        block[0x927C] = b"n" * note  # a camera's own data
    return block.tobytes()


def by_pillow(data: bytes) -> tuple[int, int]:
    with open_image(data) as image:
        return image.size[::-1] if orientation(image) in (5, 6, 7, 8) else image.size


class Counted:
    """A file, and what was read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.requests, self.bytes = data, 0, 0

    def read(self, start: int, length: int) -> bytes:
        part = self.data[start : start + length]
        self.requests, self.bytes = self.requests + 1, self.bytes + len(part)
        return part

    def size(self) -> tuple[int, int]:
        return size_of(Window(self.read(0, FIRST_READ), len(self.data), self.read))


ROTATED = [(kind, value, options) for value in range(1, 9) for kind, options in (
    ("jpeg", {}), ("jpeg", {"progressive": True, "icc_profile": b"i" * 30_000}), ("png", {}), ("webp", {}),
    ("webp", {"lossless": True}), ("tiff", {}), ("avif", {}),
)]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "options"), ROTATED)
def test_every_orientation_of_every_format(kind, value, options):
    data = encoded(kind, exif=exif(value, little=value % 2 == 0), **options)
    assert Counted(data).size() == by_pillow(data) == ((48, 64) if value > 4 else (64, 48))


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
@pytest.mark.parametrize("value", [1, 6])
def test_an_orientation_that_is_in_xmp_alone(kind, value):
    data = encoded(kind, xmp=XMP % value)
    assert Counted(data).size() == by_pillow(data) == ((48, 64) if value > 4 else (64, 48))


@pytest.mark.parametrize("kind", ["png", "webp", "avif", "jpeg"])
def test_xmp_does_not_overrule_exif(kind):
    data = encoded(kind, xmp=XMP % 6, exif=exif(3))
    try:
        assert Counted(data).size() == by_pillow(data) == (64, 48)
    except UnknownLayoutError:
        assert kind == "avif"  # which is read whole


def written(mode: str, kind: str) -> bytes | None:
    """An image of a mode; None where Pillow does not write it in this format."""
    buffer = io.BytesIO()
    try:
        Image.new(mode, (37, 11)).save(buffer, kind)
    except (OSError, KeyError, ValueError):
        return None
    return buffer.getvalue()


MODES = [(mode, kind, data) for mode in ("1", "L", "P", "RGBA", "CMYK", "I;16", "F")
         for kind in ("png", "jpeg", "tiff", "bmp", "gif", "webp") if (data := written(mode, kind))]  # fmt: skip


@pytest.mark.parametrize(("mode", "kind", "data"), MODES, ids=[f"{kind} {mode}" for mode, kind, _ in MODES])
def test_every_mode(mode, kind, data):
    assert Counted(data).size() == (37, 11)


def test_a_bitmap_from_top_to_bottom():
    data = bytearray(encoded("bmp"))
    data[22:26] = (-48).to_bytes(4, "little", signed=True)
    assert Counted(bytes(data)).size() == by_pillow(bytes(data)) == (64, 48)


@pytest.mark.parametrize(
    ("kind", "options", "requests"),
    [
        ("jpeg", {"quality": 95}, 1),
        ("jpeg", {"quality": 95, "exif": exif(6, note=60_000)}, 2),
        ("png", {"exif": exif(6)}, 1),
        ("webp", {"lossless": True, "exif": exif(6)}, 2),  # behind the pixels
        ("avif", {"quality": 100, "exif": exif(6)}, 1),
        ("tiff", {"exif": exif(6)}, 2),  # the directory is at the end
        ("bmp", {}, 1),
        ("gif", {}, 1),
    ],
)
def test_few_requests_are_enough(kind, options, requests):
    data = encoded(kind, LARGE, **options)
    assert len(data) > 64 * 1024
    file = Counted(data)
    assert file.size() == by_pillow(data)
    assert file.requests <= requests
    assert file.bytes <= FIRST_READ + 8 * 1024


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged EXIF data
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "avif", "tiff", "gif", "bmp"])
def test_a_damaged_header_gives_no_other_size_than_pillow_finds(kind):
    data, random_ = encoded(kind, **({"exif": exif(6)} if kind not in ("gif", "bmp") else {})), random.Random(kind)
    found = 0
    for _ in range(300):
        damaged = bytearray(data[: random_.choice([len(data), len(data), random_.randrange(len(data))])])
        for _ in range(random_.randrange(3)):
            if damaged:
                damaged[random_.randrange(min(len(damaged), 400))] ^= 1 << random_.randrange(8)
        try:
            size = Counted(bytes(damaged)).size()
        except UnknownLayoutError:
            continue
        found += 1
        with suppress(BadSampleError):  # it is found broken when it is decoded
            assert size == by_pillow(bytes(damaged)), bytes(damaged[:400])
    assert found > 100
