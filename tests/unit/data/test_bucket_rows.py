"""Rows by bucket: what they are, when the file is used again, and that they are the same in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.buckets import CropSettings
from smalti.data.plan import bucket_rows
from smalti.data.plan.bucket_rows import RowsByBucket, rows_by_bucket
from smalti.data.scan import index_file
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter
from smalti.errors import PreflightError

RULES = CropSettings(resolution=64, alignment=8, crop=True, crop_aspect="preserve", minimum_image_size=20)


def index_of(sizes: Sequence[tuple[int, int]], keys: Sequence[str] | None = None) -> DatasetIndex:
    """An index with these widths and heights; (0, 0) is a sample that cannot be used."""
    keys = keys or [f"{number:06}.png" for number in range(len(sizes))]
    rows = [
        {
            "key": key,
            "etag": "",
            "size": 1,
            "width": width,
            "height": height,
            "captions": [],
            "caption_etag": "",
            "content": 0,
            "caption_hash": 0,
            "place": "",
            "problem": "" if width else "broken",
        }
        for key, (width, height) in zip(keys, sizes, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with IndexWriter(sink, b"") as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    file = IndexFile(sink.getvalue())
    assert file.summary is not None
    return DatasetIndex("photos", file, file.summary)


def as_lists(found: RowsByBucket) -> list[tuple[str, list[int], str]]:
    return [(str(one.bucket), one.rows.tolist(), one.digest) for one in found.buckets]


sizes = st.lists(
    st.sampled_from([(0, 0), (10, 10), (64, 64), (65, 64), (128, 64), (64, 128), (200, 30), (31, 220)]), max_size=60
)


@settings(deadline=None, max_examples=40)
@given(sizes)
def test_each_row_is_in_the_bucket_of_its_size(tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.mktemp("plan") / "photos.rows"
    index = index_of(sizes)
    expected: dict[str, list[int]] = {}
    refused = [bool(width) and width * height < 20 * 20 for width, height in sizes]
    for row, (width, height) in enumerate(sizes):
        if width and not refused[row]:
            expected.setdefault(str(RULES.bucket(width, height)), []).append(row)
    found, again, in_memory = (
        rows_by_bucket(index, RULES, path),
        rows_by_bucket(index, RULES, path),
        rows_by_bucket(index, RULES, None),
    )

    assert {str(one.bucket): one.rows.tolist() for one in found.buckets} == expected
    assert [one.bucket for one in found.buckets] == sorted(one.bucket for one in found.buckets)
    assert found.left_out == sum(refused)
    assert as_lists(found) == as_lists(again) == as_lists(in_memory)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BATCH_ROWS", 7)
    monkeypatch.setattr(bucket_rows, "_CHUNK", 5)


def test_chunks_make_no_difference(small_batches: None, tmp_path: Path) -> None:
    sizes = [(64 + 8 * (row % 11), 64) for row in range(100)]
    found = rows_by_bucket(index_of(sizes), RULES, tmp_path / "photos.rows")
    rows = {row: one.bucket for one in found.buckets for row in one.rows.tolist()}

    assert rows == {row: RULES.bucket(*size) for row, size in enumerate(sizes)}
    assert all((np.diff(one.rows.astype(np.int64)) > 0).all() for one in found.buckets)


def test_the_file_is_used_until_the_index_or_the_buckets_change(tmp_path: Path) -> None:
    path, index = tmp_path / "photos.rows", index_of([(64, 64), (128, 64), (64, 128)])

    def made(index: DatasetIndex, settings: CropSettings) -> bool:
        before = path.stat().st_ino, path.stat().st_mtime_ns
        rows_by_bucket(index, settings, path)
        return (path.stat().st_ino, path.stat().st_mtime_ns) != before

    rows_by_bucket(index, RULES, path)
    assert not made(index, RULES)
    assert not made(index, replace(RULES, crop_style="random", maximum_image_size=2000, target_downsample_size=100))
    assert made(index, replace(RULES, resolution=32))
    assert made(index_of([(64, 64), (128, 64), (64, 136)]), replace(RULES, resolution=32))
    assert not made(index_of([(64, 64), (128, 64), (64, 136)], ["a", "b", "c"]), replace(RULES, resolution=32))


@pytest.mark.parametrize("damage", [b"", b"nothing", b"\xff" * 200])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    path, index = tmp_path / "photos.rows", index_of([(64, 64), (128, 64)])
    whole = as_lists(rows_by_bucket(index, RULES, path))
    data = path.read_bytes()
    path.write_bytes(damage or data[:-3])

    assert as_lists(rows_by_bucket(index, RULES, path)) == whole
    assert path.read_bytes() == data


def test_rows_are_kept_in_memory_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found = rows_by_bucket(index_of([(64, 64)]), RULES, tmp_path / "file/photos.rows")

    assert [one.rows.tolist() for one in found.buckets] == [[0]]
    assert "dataset photos are kept in memory" in caplog.text


def test_a_dataset_with_more_rows_than_four_bytes_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_rows, "MOST_ROWS", 1)

    with pytest.raises(PreflightError, match="dataset photos has 2 images, and one dataset has at most 1"):
        rows_by_bucket(index_of([(64, 64), (64, 64)]), RULES, None)


def test_more_buckets_than_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_rows, "_MOST_BUCKETS", 1)

    with pytest.raises(PreflightError, match="more than 1 buckets\n  fix: raise --aspect_bucket_alignment"):
        rows_by_bucket(index_of([(64, 64), (128, 64)]), RULES, None)
