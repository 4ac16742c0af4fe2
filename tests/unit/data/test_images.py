"""Bytes to pixels: every kind of image, upright, on white, in the right range; anything else is an error."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smalti.data.buckets import Bucket, CropSettings
from smalti.data.images import crop, decode, normalised
from smalti.data.scan.image_sizes import read_header
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.local import LocalStorage

SAME = CropSettings(resolution=8, alignment=8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colour_of(image: Image.Image, kind: str = "PNG", **options: object) -> tuple[int, ...]:
    """The middle pixel after decoding at 8 x 8."""
    return tuple(decode(encoded(image, kind, **options), SAME, Bucket(8, 8))[:, 4, 4].tolist())


def indexed(transparent: bool) -> Image.Image:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    if transparent:
        image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGB", (8, 8), (10, 20, 30)), (10, 20, 30)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 255)), (255, 0, 0)),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 51)), (204, 204, 204)),
        (Image.new("LA", (8, 8), (40, 0)), (255, 255, 255)),
        (Image.new("L", (8, 8), 77), (77, 77, 77)),
        (Image.new("1", (8, 8), 1), (255, 255, 255)),
        (indexed(transparent=False), (255, 0, 0)),
        (indexed(transparent=True), (255, 255, 255)),
        (Image.fromarray(np.full((8, 8), 32896, dtype=np.uint16)), (128, 128, 128)),
    ],
    ids=["rgb", "clear", "opaque", "veil", "clear grey", "grey", "bit", "palette", "clear palette", "16 bit"],
)
def test_every_mode_becomes_rgb_on_white(image: Image.Image, expected: tuple[int, int, int]) -> None:
    assert colour_of(image) == expected


def test_inks_become_light() -> None:
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))

    assert colour_of(red, "TIFF") == (255, 0, 0)


def test_a_moving_picture_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), name) for name in ("blue", "red")]

    assert colour_of(frames[0], "GIF", save_all=True, append_images=frames[1:]) == (0, 0, 255)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_pictures_are_turned_upright(kind: str, turn: int, tmp_path: Path) -> None:
    """The upper left corner of the scene is white, and the scene is wide, whatever way the camera was held."""
    scene = np.zeros((16, 24, 3), dtype=np.uint8)
    scene[:8, :12] = 255
    # How the sensor saw it: the inverse of each correction.
    seen: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(Image.fromarray(np.ascontiguousarray(seen[turn](scene))), kind, exif=exif, quality=95)
    (tmp_path / "image").write_bytes(data)
    image = decode(data, SAME, Bucket(24, 16))
    header = read_header(partial(LocalStorage(tmp_path).read_range, "image"), len(data))

    assert (header.width, header.height) == (24, 16)
    assert (image.mean(0).reshape(2, 8, 2, 12).mean((1, 3)) > 128).tolist() == [[True, False], [False, False]]


def test_scaling_keeps_smooth_colours_smooth() -> None:
    ramp = np.tile(np.linspace(0, 255, 640, dtype=np.uint8), (480, 1))
    image = Image.fromarray(np.stack([ramp] * 3, axis=-1))
    image = decode(encoded(image, "JPEG", quality=95), SAME, Bucket(64, 48)).astype(int)

    expected = np.linspace(2, 253, 64)
    assert np.abs(image - expected).max() <= 3


def test_a_cut_is_the_bucket_of_the_scaled_picture() -> None:
    crop_settings = CropSettings(resolution=8, alignment=8, crop=True, crop_style="center")
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = (0, 255, 0)
    image = decode(encoded(Image.fromarray(wide)), crop_settings, Bucket(8, 8))

    assert image.shape == (3, 8, 24)
    cut = crop(image, Bucket(8, 8), crop_settings.offset((24, 8), Bucket(8, 8)))
    assert (cut == np.array([0, 255, 0], dtype=np.uint8)[:, None, None]).all()


def test_values_reach_from_minus_one_to_one() -> None:
    assert normalised(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


def damaged(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    return data[: len(data) // 2]


@pytest.mark.parametrize("data", [b"", b"no image", *map(damaged, ("PNG", "JPEG", "WEBP", "AVIF", "TIFF", "BMP", "GIF"))])
def test_what_is_not_a_whole_picture_is_an_error(data: bytes) -> None:
    with pytest.raises(BadSampleError):
        decode(data, SAME, Bucket(8, 8))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_not_decoded() -> None:
    with pytest.raises(BadSampleError, match="megapixels"):
        decode(encoded(Image.new("1", (10_000, 10_000))), SAME, Bucket(8, 8))


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(BadSampleError, match="floating-point"):
        decode(encoded(Image.new("F", (8, 8)), "TIFF"), SAME, Bucket(8, 8))


def test_damaged_metadata_puts_no_warning_of_pillow_on_the_terminal() -> None:
    """In a process of its own: tests have their own filters of warnings."""
    tag = b"\x02\x01\x03\x00\x03\x00\x00\x00"  # 258: three numbers, which are elsewhere
    whole = encoded(Image.new("RGB", (8, 8)), "TIFF")
    at = whole.index(tag) + len(tag)
    damaged = whole[:at] + b"\xff\xff" + whole[at + 2 :]
    look = f"""
from io import BytesIO
from PIL import Image
if {{quiet}}: from smalti.data.scan.image_sizes import open_image
try: Image.open(BytesIO({damaged!r})).load()
except Exception: pass
"""
    quiet, loud = (
        subprocess.run([sys.executable, "-c", look.format(quiet=quiet)], capture_output=True, text=True, check=True).stderr
        for quiet in (True, False)
    )
    assert "Warning" in loud
    assert not quiet
