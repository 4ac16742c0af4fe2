"""The file of an index: rows across record batches, digests, samples listed as columns and read by their place."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from smalti.data.dataset import Dataset
from smalti.data.datasets.sources import LISTED, MetadataSource
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan import index_file
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.storage.local import LocalStorage

ROWS = [
    {
        "key": f"{number:02}.png",
        "size": 7,
        "etag": f"e{number}",
        "captions": [f"number {number}"],
        "width": 10 + number,
        "height": 8,
    }
    for number in range(10)
]


class Columns(MetadataSource):
    """A source that lists columns, and whose samples are parts of one file."""

    def __init__(self, rows: list[dict[str, object]], archive: bytes = b"") -> None:
        self.rows, self.archive = rows, archive

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        empty = {"caption_etag": "", "place": "", "problem": ""}
        for start in range(0, len(self.rows), 3):
            yield pa.RecordBatch.from_pylist([empty | row for row in self.rows[start : start + 3]], schema=LISTED)

    def read(self, place: str) -> bytes:
        return self.read_range(place, 0, int(place.split(":")[1]))

    def read_range(self, place: str, start: int, length: int) -> bytes:
        first, total = map(int, place.split(":"))
        return self.archive[first + start : first + min(start + length, total)]


def spec_of(folder: Path) -> DatasetSpec:
    return DatasetSpec(id="pets", instance_data_dir=folder, metadata_backend="table", caption_strategy="table")


def build(folder: Path, *rows: dict[str, object]) -> DatasetIndex:
    return build_index(spec_of(folder), LocalStorage(folder), Columns(list(rows)), folder / "run/pets.arrow")


def test_rows_are_found_across_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BATCH_ROWS", 4)
    broken = ROWS[3] | {"problem": "gone"}
    index = build(tmp_path, *ROWS[:3], broken, *ROWS[4:])

    assert [index.key(row) for row in range(10)] == [row["key"] for row in ROWS]
    assert [(batch.start, len(batch)) for batch in index.batches("key")] == [(0, 4), (4, 4), (8, 2)]
    assert [index.size(row)[0] for row in range(2, 9)] == [12, 0, 14, 15, 16, 17, 18]
    assert (len(index), index.unusable, index.size(9), index.captions(8)) == (10, 1, (19, 8), ("number 8",))
    assert [(item.key, item.reason) for item in index.quarantined] == [("03.png", "gone")]
    with pytest.raises(IndexError):
        index.key(10)


def test_digests_tell_apart_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build(tmp_path, *ROWS).digests
    assert build(tmp_path, *(row | {"etag": "touched"} for row in ROWS)).digests == before

    captions = build(tmp_path, ROWS[0] | {"captions": ["number", " 0"]}, *ROWS[1:]).digests
    content = build(tmp_path, *ROWS[:9], ROWS[9] | {"size": 8}).digests
    keys = build(tmp_path, *ROWS[:9], ROWS[9] | {"key": "other.png"}).digests
    assert (captions.keys, captions.content) == (before.keys, before.content)
    assert captions.captions != before.captions
    assert (content.keys, content.captions) == (before.keys, before.captions)
    assert content.content != before.content
    assert (keys.content, keys.captions) == (before.content, before.captions)
    assert keys.keys != before.keys

    monkeypatch.setattr(index_file, "BATCH_ROWS", 4)
    assert build(tmp_path, *ROWS).digests == before  # whatever the record batches


def test_a_sample_inside_an_archive_is_read_by_its_place(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    image = buffer.getvalue()
    source = Columns([ROWS[0] | {"width": None, "height": None, "place": f"5:{len(image)}"}], b"12345" + image + b"rest")
    storage = LocalStorage(tmp_path)
    index = build_index(spec_of(tmp_path), storage, source)

    assert index.size(0) == (30, 20)
    assert Dataset(spec=spec_of(tmp_path), storage=storage, index=index, source=source).read(0) == image
