"""Buckets that cannot fill a batch: merged, repeated, left out or refused, and always reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from smalti.data.batch_check import BatchShape, BucketCount, Share
from smalti.data.buckets import Bucket
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.loader import Loader
from smalti.data.plan.short_buckets import ShortBuckets, handle_short_buckets
from smalti.data.prepared import DataRules, PreparedData, build_datasets, prepare
from smalti.errors import PreflightError
from smalti.types import World

FOUR = BatchShape(train_batch_size=2, ranks=2, accumulation=1)
ONE_RESOLUTION = {"pets": 1024, "art": 1024}


def count(bucket: tuple[int, int], *shares: tuple[str, int]) -> BucketCount:
    return BucketCount(bucket=Bucket(*bucket), shares=tuple(Share(dataset=name, samples=n, repeats=0) for name, n in shares))


COUNTS = [
    count((64, 128), ("pets", 3)),
    count((96, 96), ("pets", 9)),
    count((128, 64), ("pets", 9)),
    count((160, 56), ("pets", 1)),
]


def test_samples_of_short_buckets_go_to_the_nearest_aspect_ratio_that_fills_a_batch() -> None:
    handled = handle_short_buckets(COUNTS, FOUR, "merge", ONE_RESOLUTION)

    assert handled.moved == {("pets", Bucket(64, 128)): Bucket(96, 96), ("pets", Bucket(160, 56)): Bucket(128, 64)}
    assert handled.notices == (
        "2 buckets do not fill an effective batch of 4; their images are trained in the nearest aspect ratio"
        " (--short_buckets=merge): 64x128 (3 samples) to 96x96, 160x56 (1 sample) to 128x64",
    )


def test_samples_stay_at_the_resolution_of_their_dataset() -> None:
    counts = [count((64, 64), ("pets", 9)), count((128, 128), ("art", 9)), count((120, 136), ("art", 1))]

    assert handle_short_buckets(counts, FOUR, "merge", {"pets": 64, "art": 128}).moved == {
        ("art", Bucket(120, 136)): Bucket(128, 128)
    }


def test_short_buckets_are_left_out_if_wanted() -> None:
    handled = handle_short_buckets(COUNTS, FOUR, "drop", ONE_RESOLUTION)

    assert [handled.bucket("pets", one.bucket) for one in COUNTS] == [None, Bucket(96, 96), Bucket(128, 64), None]
    assert "4 of 22 samples are left out (--short_buckets=drop): 64x128 (3 samples), 160x56 (1 sample)" in handled.notices[0]


def test_repeats_are_raised_if_wanted() -> None:
    handled = handle_short_buckets(COUNTS, FOUR, "repeat", ONE_RESOLUTION)

    assert (handled.moved, handled.raised) == ({}, {Bucket(64, 128): 1, Bucket(160, 56): 3})
    assert "bucket 64x128: repeats raised to 1 (pets)" in handled.notices[0]


def test_they_are_refused_if_wanted_with_the_ways_out() -> None:
    with pytest.raises(PreflightError, match="--short_buckets=drop: leaves these buckets out; merge: trains"):
        handle_short_buckets(COUNTS, FOUR, "error", ONE_RESOLUTION)


@pytest.mark.parametrize("policy", ["merge", "drop"])
def test_it_is_an_error_where_no_bucket_fills_a_batch(policy: ShortBuckets) -> None:
    with pytest.raises(PreflightError, match="will produce zero usable batches") as caught:
        handle_short_buckets([count((64, 128), ("pets", 3)), count((96, 96), ("pets", 2))], FOUR, policy, ONE_RESOLUTION)

    assert "2 bucket(s) have too few samples" in str(caught.value)
    assert "--short_buckets" not in str(caught.value)


def test_nothing_is_said_where_every_bucket_fills_a_batch() -> None:
    assert handle_short_buckets(COUNTS[1:3], FOUR, "merge", ONE_RESOLUTION).notices == ()


# --- in a run ---------------------------------------------------------------------------------------------------------


def image(path: Path, size: tuple[int, int], colour: tuple[int, int, int] = (0, 0, 0)) -> None:
    Image.new("RGB", size, colour).save(path)
    path.with_suffix(".txt").write_text(path.stem)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine squares, and two images of twice the width, red, with blue edges left and right that a square crop leaves out."""
    place = tmp_path / "images"
    place.mkdir()
    for number in range(9):
        image(place / f"{number}.png", (32, 32))
    for name in ("a", "b"):
        wide = Image.new("RGB", (64, 32), (0, 0, 255))
        wide.paste((255, 0, 0), (16, 0, 48, 32))
        wide.save(place / f"{name}.png")
        (place / f"{name}.txt").write_text(name)
    return place


def data_of(folder: Path, policy: ShortBuckets, directory: Path | None = None) -> PreparedData:
    specs, _ = parse_datasets(
        [{"id": "pets", "instance_data_dir": str(folder)}], where="", defaults=DataDefaults(resolution=16)
    )
    datasets = build_datasets(specs, Catalog(), directory)
    return prepare(datasets, DataRules(seed=1, shape=FOUR, alignment=8, short_buckets=policy), directory=directory)


def test_a_merged_image_is_cropped_to_its_new_bucket(folder: Path) -> None:
    data = data_of(folder, "merge")
    seen = {}
    with Loader(data, world=World(), micro_batch=4) as loader:
        for _ in range(6):
            (micro,) = next(loader).micro
            assert micro.bucket == Bucket(16, 16)
            assert micro.pixels is not None
            seen.update(zip(micro.captions, micro.pixels, strict=True))

    assert seen.keys() == set("012345678ab")
    assert seen["a"][0].min() > 0.8  # red all over
    assert seen["a"][2].max() < -0.8
    assert [part.rows.tolist() for part in data.order.buckets[0].parts] == [list(range(9)), [9, 10]]
    assert [(one.bucket, one.total) for one in data.counts] == [(Bucket(16, 16), 11)]


def test_dropped_images_are_in_no_bucket(folder: Path) -> None:
    data = data_of(folder, "drop")

    (content,) = data.order.buckets
    assert (content.bucket, [part.rows.tolist() for part in content.parts]) == (Bucket(16, 16), [list(range(9))])
    assert data.counts[0].total == 9


def test_the_policy_is_recorded_only_where_it_did_something(folder: Path) -> None:
    assert data_of(folder, "merge").settings["pets"]["short_buckets"] == "merge"
    assert data_of(folder, "merge").identity != data_of(folder, "drop").identity
    for name in ("a", "b"):
        (folder / f"{name}.png").unlink()
    assert "short_buckets" not in data_of(folder, "merge").settings["pets"]
    assert data_of(folder, "merge").identity == data_of(folder, "error").identity


def test_ranks_that_open_the_file_have_the_order_of_the_process_that_made_it(folder: Path, tmp_path: Path) -> None:
    made, opened, alone = data_of(folder, "merge", tmp_path), data_of(folder, "merge", tmp_path), data_of(folder, "merge")

    assert (tmp_path / "pets.rows").exists()
    assert made.identity == opened.identity == alone.identity
    for position in range(5):
        batches = [data.order.batch(position).samples.tolist() for data in (made, opened, alone)]
        assert batches[0] == batches[1] == batches[2]
