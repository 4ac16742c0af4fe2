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
from smalti.data.images import Bytes, crop, decode as decode_scaled, normalised, srgb_transform
from smalti.data.scan.image_sizes import read_header
from smalti.data.scan.quarantine import BadSampleError
from smalti.data.storage.local import LocalStorage
from support.colour_profiles import ADOBE_GAMMA, ADOBE_RGB, DISPLAY_P3, SRGB, grey_profile, ink_profile, rgb_profile, values_in

SAME = CropSettings(resolution=8, alignment=8)


def decode(data: bytes, settings: CropSettings, bucket: Bucket) -> Bytes:
    """An image scaled for its bucket."""
    return decode_scaled(data, lambda width, height: settings.resized(width, height, bucket))


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


COLOURS = [(200, 30, 30), (240, 130, 20), (224, 172, 140), (70, 140, 50), (128, 128, 128), (255, 255, 255)]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize(("primaries", "gamma"), [(DISPLAY_P3, None), (ADOBE_RGB, ADOBE_GAMMA)], ids=["p3", "adobe"])
@pytest.mark.parametrize("colour", COLOURS, ids=str)
def test_colours_with_a_profile_become_srgb(kind: str, primaries: np.ndarray, gamma: float | None, colour: tuple) -> None:
    image = Image.new("RGB", (8, 8), values_in(primaries, gamma, colour))
    options = {"quality": 100, "subsampling": "4:4:4"} if kind in ("JPEG", "AVIF") else {"lossless": True}

    found = colour_of(image, kind, icc_profile=rgb_profile(primaries, gamma), **options)

    assert np.abs(np.subtract(found, colour)).max() <= 3


def test_profiles_hold_for_every_mode_of_images() -> None:
    """Grey, 16 bits, palettes, transparency on white, inks, and grey images with a profile of RGB."""
    p3, red = rgb_profile(DISPLAY_P3), values_in(DISPLAY_P3, None, (200, 30, 30))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, *red])
    half = Image.new("RGBA", (8, 8), (*red, 0))
    half.paste((*red, 255), (4, 0, 8, 8))
    shade = Image.fromarray(np.full((8, 8), 128 * 257, dtype=np.uint16))

    assert colour_of(palette, icc_profile=p3) == pytest.approx((200, 30, 30), abs=2)
    assert colour_of(half, icc_profile=p3) == pytest.approx((200, 30, 30), abs=2)
    assert decode(encoded(half, icc_profile=p3), SAME, Bucket(8, 8))[:, 4, 1].tolist() == [255, 255, 255]
    linear = grey_profile(1.0)
    for image in (Image.new("L", (8, 8), 128), Image.new("LA", (8, 8), (128, 255)), shade):
        assert colour_of(image, icc_profile=linear) == pytest.approx((188, 188, 188), abs=1)
        assert colour_of(image, icc_profile=p3) == (128, 128, 128)
    assert colour_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF", icc_profile=ink_profile()) == (119, 119, 119)


@pytest.mark.parametrize(
    ("mode", "profile", "logged"),
    [
        ("RGB", rgb_profile(SRGB), False),
        ("RGB", b"no profile", True),
        ("RGB", rgb_profile(DISPLAY_P3)[:200], True),
        ("RGB", grey_profile(1.0), True),
        ("CMYK", rgb_profile(DISPLAY_P3), True),
    ],
    ids=["srgb", "damaged", "truncated", "grey", "not of inks"],
)
def test_a_profile_of_srgb_or_one_that_cannot_be_used_changes_nothing(
    mode: str, profile: bytes, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even by rounding, so that latents that were cached before are right."""
    noise = np.random.default_rng(3).integers(0, 256, (48, 64, len(mode)), dtype=np.uint8)
    image = Image.fromarray(noise, mode)
    srgb_transform.cache_clear()

    plain, profiled = (decode(encoded(image, "TIFF", **more), SAME, Bucket(8, 8)) for more in ({}, {"icc_profile": profile}))

    assert np.array_equal(plain, profiled)
    assert ("a colour profile is ignored" in caplog.text) is logged


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
