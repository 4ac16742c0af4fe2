"""Aspect buckets: aligned, near the wanted area and shape, and covered by the scaled image."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.buckets import REFUSED, Bucket, CropSettings, choices_of

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


def accepted(crop_settings: CropSettings, *sizes: tuple[int, int]) -> list[bool]:
    widths, heights = np.array(sizes).T
    return list(crop_settings.accepts(widths, heights))


def classes_of(crop_settings: CropSettings, images: list[tuple[int, int, int]]) -> list[int]:
    return list(crop_settings.classes(*np.array(images).T))


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


limits = st.floats(64, 4096)


@given(crop_settings, sides, sides, limits, limits, draws)
def test_a_maximum_size_keeps_the_crop_inside_and_the_aspect_ratio(
    crop_settings: CropSettings, width: int, height: int, maximum: float, target: float, fractions: tuple[float, float]
) -> None:
    bucket = crop_settings.bucket(width, height)
    plain = crop_settings.resized(width, height, bucket)
    limited = replace(crop_settings, maximum_image_size=maximum, target_downsample_size=target)
    resized = limited.resized(width, height, bucket)
    left, top = limited.offset(resized, bucket, fractions)

    assert (0 <= left <= resized[0] - bucket.width, 0 <= top <= resized[1] - bucket.height) == (True, True)
    # Never smaller than without a limit, and not enlarged where that is not enlarged.
    assert all(small <= one <= max(small, own) for small, one, own in zip(plain, resized, (width, height), strict=True))
    if crop_settings.crop:
        scale = max(one / own for one, own in zip(resized, (width, height), strict=True))
        assert resized == pytest.approx((width * scale, height * scale), abs=1 + max(width, height) / min(width, height))


@given(crop_settings, sides, sides)
def test_a_target_equal_to_the_resolution_changes_nothing(crop_settings: CropSettings, width: int, height: int) -> None:
    bucket = crop_settings.bucket(width, height)
    limited = replace(
        crop_settings, maximum_image_size=crop_settings.resolution, target_downsample_size=crop_settings.resolution
    )

    assert limited.resized(width, height, bucket) == crop_settings.resized(width, height, bucket)


@pytest.mark.parametrize(
    ("kind", "size", "resized"),
    [
        ("pixel_area", (4000, 3000), (1478, 1109)),  # as many pixels as 1280x1280
        ("area", (4000, 3000), (1478, 1109)),
        ("pixel", (4000, 3000), (1707, 1280)),
        ("pixel_area", (1600, 1400), (1170, 1024)),  # not above the maximum
        ("pixel", (1536, 1536), (1024, 1024)),
    ],
)
def test_large_images_are_scaled_to_the_target_before_they_are_cropped(
    kind: str, size: tuple[int, int], resized: tuple[int, int]
) -> None:
    """In all units; "area" has megapixels."""
    edges = {"resolution": 1024, "maximum_image_size": 1536, "target_downsample_size": 1280}
    values = {name: edge * edge / 1e6 if kind == "area" else edge for name, edge in edges.items()}
    limited = CropSettings(resolution_type=kind, crop=True, **values)  # type: ignore[arg-type]

    assert limited.resized(*size, limited.bucket(*size)) == resized


def test_images_outside_of_the_aspect_ratios_are_skipped() -> None:
    limits = CropSettings(resolution=64, minimum_aspect_ratio=0.5, maximum_aspect_ratio=2)

    assert accepted(limits, (100, 200), (200, 100), (99, 200), (201, 100)) == [True, True, False, False]


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
    ("kind", "minimum", "expected"),
    [("pixel", 300, False), ("pixel_area", 300, True), ("area", 0.1, True), ("area", 0.2, False)],
)
def test_the_least_size_is_measured_in_the_unit_of_the_resolution(kind: str, minimum: float, expected: bool) -> None:
    crop_settings = CropSettings(resolution=64, resolution_type=kind, minimum_image_size=minimum)  # type: ignore[arg-type]

    assert accepted(crop_settings, (600, 250)) == [expected]


LISTED = CropSettings(
    resolution=1024, crop=True, crop_aspect="closest", crop_aspect_buckets=((1.0, 1.0), (1.5, 1.0), (0.5, 1.0))
)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((1000, 1000), Bucket(1024, 1024)),
        ((1200, 1000), Bucket(1024, 1024)),
        ((1300, 1000), Bucket(1280, 832)),
        ((4000, 100), Bucket(1280, 832)),
        ((1000, 1300), Bucket(1024, 1024)),
        ((1000, 1500), Bucket(704, 1472)),
    ],
)
def test_the_closest_listed_aspect_is_the_bucket(size: tuple[int, int], bucket: Bucket) -> None:
    assert LISTED.bucket(*size) == bucket


def test_weights_say_how_many_images_get_a_random_aspect() -> None:
    settings = replace(LISTED, crop_aspect="random", crop_aspect_buckets=((1.0, 3.0), (1.5, 1.0), (0.5, 0.0)))
    found = [settings.bucket(1000, 1000, choice) for choice in range(settings.choices)]

    assert (found.count(Bucket(1024, 1024)), found.count(Bucket(1280, 832))) == (48, 16)


def test_choices_of_images_are_even_and_their_own() -> None:
    sizes = np.arange(100_000, 164_000, dtype=np.int64)
    edges = np.full(len(sizes), 512, dtype=np.int32)
    found = choices_of(sizes, edges, edges)

    assert found.tolist()[1000:2000] == choices_of(sizes[1000:2000], edges[:1000], edges[:1000]).tolist()
    counts = np.bincount(found, minlength=64)
    assert len(counts) == 64
    assert 850 < counts.min() < counts.max() < 1150


def test_images_that_would_be_enlarged_too_much_are_left_out() -> None:
    settings = replace(LISTED, max_upscale_threshold=0.25)

    assert accepted(settings, (800, 650), (820, 820)) == [False, True]
    assert settings.bucket(1030, 670) == Bucket(1280, 832)
    assert settings.bucket(820, 1200) == Bucket(704, 1472)


# Sizes of small ratios have many ties of rounding: 9:8 is 1.125.
close_sides = st.one_of(sides, st.integers(1, 100), st.integers(1, 100).map(lambda number: 8 * number))
images = st.tuples(close_sides, close_sides, st.integers(0, 63))


@given(crop_settings, st.lists(images, min_size=1, max_size=50), st.sampled_from([0.0, 100.0, 333.3]))
def test_images_of_a_class_have_one_bucket(
    crop_settings: CropSettings, images: list[tuple[int, int, int]], minimum: float
) -> None:
    crop_settings = replace(crop_settings, minimum_image_size=minimum)
    classes = classes_of(crop_settings, [*images, (0, 0, 0)])
    found = {
        (number, crop_settings.bucket(*image)) for number, image in zip(classes, images, strict=False) if number != REFUSED
    }

    assert len(found) == len({number for number, _ in found})
    assert [number != REFUSED for number in classes] == [*accepted(crop_settings, *((w, h) for w, h, _ in images)), False]


def test_there_are_far_fewer_classes_than_sizes() -> None:
    edges = np.arange(500, 1500)
    widths, heights = (each.ravel() for each in np.meshgrid(edges, edges))
    classes = CropSettings(resolution=1024).classes(widths, heights, np.zeros_like(widths))
    ratios = {number for number in classes.tolist() if number > 0}

    assert len(ratios) == 2 * 201  # 1.00 to 3.00, wide and tall
    assert 0 < np.count_nonzero(classes < 0) < 5000  # at a tie


def by_the_list(settings: CropSettings, width: int, height: int, choice: int) -> Bucket | None:
    """The rule in words: of the aspects that do not enlarge too much the nearest, or one by weight."""
    most = math.inf if settings.max_upscale_threshold is None else 1 + settings.max_upscale_threshold
    rows = zip(settings.crop_aspect_buckets, settings.listed_buckets, strict=True)
    allowed = [(*pair, bucket) for pair, bucket in rows if max(bucket.width / width, bucket.height / height) <= most]
    if settings.crop_aspect == "closest":
        return min(allowed, key=lambda each: abs(math.log(each[0] * height / width)))[2] if allowed else None
    rest = (choice + 0.5) / 64 * sum(weight for _, weight, _ in allowed)
    for _, weight, bucket in allowed:
        rest -= weight
        if rest < 0:
            return bucket
    return allowed[-1][2] if allowed else None


listed = st.builds(
    CropSettings,
    resolution=st.sampled_from([500.0, 1024.0]),
    alignment=st.sampled_from([8, 64]),
    crop=st.just(True),
    crop_aspect=st.sampled_from(["closest", "random"]),
    # With ties of the square between 0.5 and 2, and of all images between equal ones.
    crop_aspect_buckets=st.lists(
        st.tuples(st.one_of(st.sampled_from([0.5, 0.75, 1.0, 4 / 3, 2.0]), st.floats(0.2, 5)), st.floats(0.01, 5)),
        min_size=1,
        max_size=6,
    ).map(tuple),
    max_upscale_threshold=st.sampled_from([None, 0.0, 0.25, 3.0]),
)


@given(listed, st.lists(images, min_size=1, max_size=20))
def test_listed_aspects_are_found_for_many_images_as_for_one(
    settings: CropSettings, images: list[tuple[int, int, int]]
) -> None:
    expected = [by_the_list(settings, *image) for image in images]
    classes = classes_of(settings, images)

    assert [number != REFUSED for number in classes] == [bucket is not None for bucket in expected]
    for image, number, bucket in zip(images, classes, expected, strict=True):
        if bucket is not None:
            assert settings.bucket(*image) == settings.listed_buckets[number - 1] == bucket
