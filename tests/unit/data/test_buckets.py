"""Aspect buckets: aligned, near the wanted area and shape, and covered by the scaled image."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.buckets import Bucket, CropSettings

settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")

sides = st.integers(1, 20_000)
crop_settings = st.builds(
    CropSettings,
    resolution=st.sampled_from([64.0, 500.0, 1024.0]),
    resolution_type=st.sampled_from(["pixel", "pixel_area"]),
    alignment=st.sampled_from([1, 4, 8, 64]),
    crop=st.booleans(),
    crop_aspect=st.sampled_from(["square", "preserve"]),
    crop_style=st.sampled_from(["center", "random", "corner"]),
)
draws = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)


@given(crop_settings, sides, sides)
def test_both_sides_are_multiples_of_the_alignment(crop_settings: CropSettings, width: int, height: int) -> None:
    bucket = crop_settings.bucket(width, height)

    assert (bucket.width % crop_settings.alignment, bucket.height % crop_settings.alignment) == (0, 0)
    assert min(bucket.width, bucket.height) > 0


@given(crop_settings, sides, sides)
def test_a_transposed_picture_has_the_transposed_bucket(crop_settings: CropSettings, width: int, height: int) -> None:
    bucket = crop_settings.bucket(width, height)

    assert crop_settings.bucket(height, width) == Bucket(bucket.height, bucket.width)


@given(crop_settings, sides, sides, draws)
def test_the_scaled_picture_covers_the_bucket_and_the_cut_lies_inside(
    crop_settings: CropSettings, width: int, height: int, fractions: tuple[float, float]
) -> None:
    bucket = crop_settings.bucket(width, height)
    resized = crop_settings.resized(width, height, bucket)
    left, top = crop_settings.offset(resized, bucket, fractions)

    assert 0 <= left <= resized[0] - bucket.width
    assert 0 <= top <= resized[1] - bucket.height


@given(crop_settings, sides, sides)
def test_nothing_is_scaled_further_than_needed(crop_settings: CropSettings, width: int, height: int) -> None:
    bucket = crop_settings.bucket(width, height)
    resized = crop_settings.resized(width, height, bucket)

    assert resized[0] == bucket.width or resized[1] == bucket.height


@given(crop_settings, sides, sides)
def test_a_cropped_picture_keeps_its_aspect_ratio_to_half_a_pixel(crop_settings: CropSettings, width: int, height: int) -> None:
    if not crop_settings.crop:
        return
    bucket = crop_settings.bucket(width, height)
    resized = crop_settings.resized(width, height, bucket)
    scale = max(bucket.width / width, bucket.height / height)

    assert resized == pytest.approx((width * scale, height * scale), abs=0.5 + 1e-6)


@given(crop_settings, st.integers(200, 5000), st.floats(1, 4))
def test_a_bucket_has_nearly_the_aspect_ratio_of_the_picture(crop_settings: CropSettings, short: int, aspect: float) -> None:
    if crop_settings.crop and crop_settings.crop_aspect == "square":
        return
    long = math.ceil(short * aspect)
    bucket = crop_settings.bucket(long, short)
    # Rounding of the ratio to two decimals, and of each side to half the alignment.
    error = 0.005 + crop_settings.alignment / 2 * (1 / bucket.height + 1 / bucket.width)

    assert math.log(bucket.width / bucket.height) == pytest.approx(math.log(long / short), abs=1.2 * error + 1e-6)


@given(st.sampled_from([512.0, 1024.0]), st.integers(500, 4000), st.integers(500, 4000))
def test_an_area_is_kept_whatever_the_shape(edge: float, width: int, height: int) -> None:
    bucket = CropSettings(resolution=edge, alignment=8).bucket(width, height)

    assert bucket.width * bucket.height == pytest.approx(edge * edge, rel=0.03)


@given(sides, sides)
def test_square_crops_share_one_bucket(width: int, height: int) -> None:
    assert CropSettings(resolution=512, crop=True).bucket(width, height) == Bucket(512, 512)


@pytest.mark.parametrize(
    ("kind", "resolution", "size", "bucket"),
    [
        ("pixel_area", 1024, (1920, 1080), "1344x768"),
        ("area", 1.048576, (1920, 1080), "1344x768"),
        ("pixel_area", 1024, (1080, 1920), "768x1344"),
        ("pixel", 512, (1920, 1080), "896x512"),
        ("pixel_area", 512, (640, 480), "576x448"),
        ("area", 0.25, (3000, 3000), "512x512"),
    ],
)
def test_known_sizes_go_to_known_buckets(kind: str, resolution: float, size: tuple[int, int], bucket: str) -> None:
    assert str(CropSettings(resolution=resolution, resolution_type=kind).bucket(*size)) == bucket  # type: ignore[arg-type]


def test_without_cropping_a_picture_is_bent_to_its_bucket() -> None:
    crop_settings = CropSettings(resolution=64, alignment=8)

    assert crop_settings.resized(1000, 999, Bucket(64, 64)) == (64, 64)


def test_a_random_cut_reaches_both_ends() -> None:
    crop_settings = CropSettings(resolution=64, crop=True, crop_style="random")
    cuts = {crop_settings.offset((67, 64), Bucket(64, 64), (k / 100, 0.0))[0] for k in range(100)}

    assert cuts == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "minimum", "accepted"),
    [("pixel", 300, False), ("pixel_area", 300, True), ("area", 0.1, True), ("area", 0.2, False)],
)
def test_the_least_size_is_measured_in_the_unit_of_the_resolution(kind: str, minimum: float, accepted: bool) -> None:
    crop_settings = CropSettings(resolution=64, resolution_type=kind, minimum_size=minimum)  # type: ignore[arg-type]

    assert crop_settings.accepts(600, 250) is accepted
