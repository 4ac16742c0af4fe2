"""A dataset that has not changed keeps its index as it is; every change of files or table is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from smalti.data import DataDefaults, catalog_of, parse_datasets
from smalti.data.datasets.sources import MetadataSource
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.sources import unchanged
from smalti.data.sources.discovery import Discovery
from smalti.data.storage.local import LocalStorage
from smalti.plugins import load_plugins
from smalti_data.json_table import JsonLines
from smalti_data.tables.csv_table import CsvSource
from smalti_data.tables.parquet_table import ParquetSource

CATALOG = catalog_of(load_plugins())

NAMES = ("a.png", "b.png", "gone.png")


def write_table(backend: str, path: Path, *captions: str) -> None:
    if backend == "csv":
        rows = "".join(f"{name},{caption}\n" for name, caption in zip(NAMES, captions, strict=False))
        path.write_text(f"filename,caption\n{rows}")
    elif backend == "parquet":
        pq.write_table(pa.table({"filename": NAMES[: len(captions)], "caption": list(captions)}), path)
    else:
        rows = ({"filename": name, "caption": caption} for name, caption in zip(NAMES, captions, strict=False))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SOURCES: dict[str, Callable[[DatasetSpec, LocalStorage], MetadataSource]] = {
    "discovery": Discovery,
    "json": JsonLines,
    "csv": CsvSource,
    "parquet": ParquetSource,
}


class Dataset:
    """Two images with text files, and a table that names one more."""

    def __init__(self, folder: Path, backend: str, captions: str) -> None:
        self.images = folder / "pets"
        self.images.mkdir()
        self.index = folder / "run/pets.arrow"
        self.table = folder / f"table.{backend}"
        for number, name in enumerate(NAMES[:2]):
            Image.new("RGB", (8 + number, 8)).save(self.images / name)
            (self.images / name).with_suffix(".txt").write_text(f"text {number}")
        (self.images / "film.mp4").write_bytes(b"x")
        write_table(backend, self.table, "one", "two", "three")
        options = {"path": str(self.table)}
        blocks = {"json": {"json_table": options}, "discovery": {}}.get(backend, {"metadata_options": options})
        self.spec = DatasetSpec(
            id="pets", instance_data_dir=self.images, metadata_backend=backend, caption_strategy=captions, **blocks
        )
        self.source: MetadataSource = Discovery(self.spec, LocalStorage(self.images))

    def scan(self) -> DatasetIndex:
        storage = LocalStorage(self.images)
        self.source = SOURCES[self.spec.metadata_backend](self.spec, storage)
        return build_index(self.spec, storage, self.source, self.index)

    def rebuilt(self) -> bool:
        """Whether another scan writes the index again."""
        before = self.index.stat().st_ino, self.index.stat().st_mtime_ns
        again = self.scan()
        after = self.index.stat().st_ino, self.index.stat().st_mtime_ns
        assert len(again) == len(list(again.keys()))
        return before != after


@pytest.fixture(params=["discovery", "json", "csv", "parquet"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def changed_image(dataset: Dataset) -> None:
    Image.new("RGB", (64, 8)).save(dataset.images / "b.png")


def changed_text(dataset: Dataset) -> None:
    (dataset.images / "b.txt").write_text("another text")


def added_file(dataset: Dataset) -> None:
    Image.new("RGB", (8, 8)).save(dataset.images / "c.png")


def removed_file(dataset: Dataset) -> None:
    (dataset.images / "b.png").unlink()


@pytest.mark.parametrize("change", [changed_image, changed_text, added_file, removed_file])
def test_a_changed_file_is_noticed_and_an_unchanged_dataset_keeps_its_index(tmp_path, backend, change) -> None:
    dataset = Dataset(tmp_path, backend, "textfile")
    dataset.scan()
    assert not dataset.rebuilt()
    change(dataset)
    assert dataset.rebuilt()
    rows = {key: number for number, key in enumerate(dataset.scan().keys())}
    index = dataset.scan()
    if change is changed_image:
        assert index.size(rows["b.png"]) == (64, 8)
    if change is changed_text:
        assert index.captions(rows["b.png"]) == ("another text",)
    if change is added_file:
        assert ("c.png" in rows) == (backend == "discovery")
    if change is removed_file:
        assert "b.png" not in rows or index.size(rows["b.png"]) == (0, 0)


@pytest.mark.parametrize("backend", ["json", "csv", "parquet"])
def test_a_changed_table_is_noticed(tmp_path, backend) -> None:
    dataset = Dataset(tmp_path, backend, backend)
    assert dataset.scan().captions(1) == ("two",)
    assert not dataset.rebuilt()
    write_table(backend, dataset.table, "one", "a longer text")
    assert dataset.rebuilt()
    assert dataset.scan().captions(1) == ("a longer text",)


def test_what_the_user_is_told_stays_the_same(tmp_path, backend) -> None:
    dataset = Dataset(tmp_path, backend, "textfile")
    told = []
    for _ in range(2):
        dataset.scan()
        source = dataset.source
        told.append((source.notices, dict(source.skipped_files)))
    assert told[0] == told[1]
    assert backend == "json" or told[0] != ((), {})


class Counting(LocalStorage):
    """Counts how often everything is listed."""

    listings = 0

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        self.listings += 1
        yield from super().list_columns(prefix, after=after)


@pytest.mark.parametrize("most", [1 << 20, 1])
def test_a_scan_lists_once_whether_files_changed_or_not(tmp_path, backend, most, monkeypatch) -> None:
    """A listing that is too long to be kept is the exception."""
    monkeypatch.setattr(unchanged, "_MOST", most)
    dataset = Dataset(tmp_path, backend, "textfile" if backend == "discovery" else backend)

    def listings() -> int:
        storage = Counting(dataset.images)
        build_index(dataset.spec, storage, SOURCES[backend](dataset.spec, storage), dataset.index)
        return storage.listings

    assert [listings(), listings()] == [1, 1]
    Image.new("RGB", (64, 8)).save(dataset.images / "b.png")
    before = dataset.index.stat().st_ino
    assert listings() == (1 if most > 1 else 2)
    assert dataset.index.stat().st_ino != before
    index = dataset.scan()
    assert index.size(1) == (64, 8)


def test_unusable_images_are_tried_again_but_not_rows_without_an_image(tmp_path) -> None:
    dataset = Dataset(tmp_path, "json", "json")
    assert dataset.scan().unusable == 1  # the row without an image
    assert not dataset.rebuilt()
    (dataset.images / "b.png").write_bytes(b"damaged")
    assert dataset.scan().unusable == 2
    assert dataset.rebuilt()


def test_samples_without_a_caption_are_not_tried_again(tmp_path, backend) -> None:
    dataset = Dataset(tmp_path, backend, "textfile" if backend == "discovery" else backend)
    (dataset.images / "b.txt").unlink()
    write_table(backend, dataset.table, "one", "")
    assert dataset.scan().unusable == 1
    assert not dataset.rebuilt()
    (dataset.images / "b.txt").write_text("a text")
    write_table(backend, dataset.table, "one", "two")
    assert dataset.rebuilt()
    assert dataset.scan().unusable == 0


def test_another_configuration_is_another_index(tmp_path, backend) -> None:
    dataset = Dataset(tmp_path, backend, "textfile")
    dataset.scan()
    dataset.spec = dataset.spec.model_copy(update={"caption_strategy": "filename"})
    assert dataset.rebuilt()


@pytest.mark.parametrize("backend", ["json", "csv"])
def test_another_order_of_columns_with_weights_is_noticed(tmp_path, backend) -> None:
    dataset = Dataset(tmp_path, backend, backend)
    write_table(backend, dataset.table, "one", "two")

    def weighted(**columns: float) -> DatasetSpec:
        entry = {"id": "pets", "instance_data_dir": str(dataset.images), "metadata_backend": backend}
        entry[backend] = {"path": str(dataset.table), "caption_column": columns}
        (spec,), problems = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
        assert not problems
        return spec

    dataset.spec = weighted(caption=1, filename=3)
    assert dataset.scan().captions(0) == ("one", "a.png")
    dataset.spec = weighted(filename=3, caption=1)
    assert dataset.scan().captions(0) == ("a.png", "one")
