"""Parquet tables beside images, and parquet files with the images in them."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from smalti import ConfigError, UserError
from smalti.data import DatasetSpec, MissingFileError, Storage, StoredFile
from smalti.data.storage.local import LocalStorage
from smalti_data.archives import row_images
from smalti_data.dataset import dataset
from smalti_data.tables.parquet_table import open_parquet


class Remote(Storage):
    """A folder that is read through the methods of a storage alone, as a bucket is. Counts requests and bytes."""

    def __init__(self, root: Path) -> None:
        self._local = LocalStorage(root)
        self.bytes = self.requests = 0

    @property
    def location(self) -> str:
        return "remote"

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        return self._local.list(prefix)

    def stat(self, key: str) -> StoredFile:
        return self._local.stat(key)

    def read(self, key: str) -> bytes:
        raise AssertionError("read whole")

    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._local.read_range(key, start, length)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(data)
        return data

    def write(self, key: str, data: bytes) -> None:
        raise AssertionError("written")


def spec_of(**options) -> DatasetSpec:
    weights = options.get("caption_column")
    return DatasetSpec(
        id="pets",
        metadata_backend="parquet",
        caption_strategy="parquet",
        metadata_options=options,
        caption_weights=tuple(weights.values()) if isinstance(weights, dict) else (),
    )


def found(storage, **options) -> dict[str, tuple]:
    return {one.key: (one.captions, one.width, one.height) for one in open_parquet(spec_of(**options), storage).list()}


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name in ("7.png", "8.png", "d/9.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"image")
    return tmp_path


def test_a_table_of_identifiers_with_several_kinds_of_captions(pets: Path) -> None:
    rows = {
        "id": [8, 7],
        "gpt": pa.array(["a", None]).dictionary_encode(),
        "tags": [["x", ""], ["b", "c"]],
        "deep": [{"short": "s", "other": 1}, {"short": None, "other": 2}],
        "width": [64.0, None],
        "height": [16, 8],
    }
    pq.write_table(pa.table(rows), pets / "metadata.parquet", row_group_size=1)
    remote, base = Remote(pets), {"filename_column": "id"}
    assert found(remote, **base, caption_column=["gpt", "tags"]) == {
        "7.png": (("b", "c"), None, 8),
        "8.png": (("a", "x"), 64, 16),
    }
    assert found(remote, **base, caption_column={"gpt": 2, "deep.short": 1}) == {
        "7.png": ((), None, 8),
        "8.png": (("a", "s"), 64, 16),
    }
    assert found(remote, **base, caption_column="deep.short", fallback_caption_column="tags")["7.png"][0] == ("b", "c")
    assert found(remote, **base, identifier_includes_extension=False, caption_column="gpt")["7.png"][0] == ()
    with pytest.raises(UserError, match="no image in"):
        found(remote, **base, identifier_includes_extension=True, caption_column="gpt")


def test_only_the_columns_of_the_entry_are_read_from_a_remote_table(pets: Path) -> None:
    noise = [str(number) * 3000 for number in range(2000)]
    table = pa.table({"filename": ["d/9.jpg"] * 2000, "caption": ["x"] * 2000, "noise": noise})
    pq.write_table(table, pets / "t.parquet", compression="none", use_dictionary=["filename", "caption"])
    remote = Remote(pets)
    assert found(remote, path="t.parquet") == {"d/9.jpg": (("x",), None, None)}
    assert remote.bytes < 0.5 * (pets / "t.parquet").stat().st_size
    assert remote.requests < 10


def test_a_folder_of_tables_and_damaged_ones(pets: Path) -> None:
    (pets / "tables").mkdir()
    for name, number in (("a", 7), ("b", 8)):
        pq.write_table(pa.table({"filename": [f"{number}.png"], "caption": [name]}), pets / "tables" / f"{name}.parquet")
    expected = {"7.png": (("a",), None, None), "8.png": (("b",), None, None)}
    assert found(LocalStorage(pets), path=str(pets / "tables")) == found(Remote(pets), path="tables") == expected
    torn = pets / "tables" / "b.parquet"
    torn.write_bytes(torn.read_bytes()[:-9])
    for storage, path in ((LocalStorage(pets), str(pets / "tables")), (Remote(pets), "tables")):
        with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file") as error:
            found(storage, path=path)
        assert error.value.fix
    with pytest.raises(UserError, match="no parquet file in"):
        found(LocalStorage(pets), path=str(pets / "d"))
    pq.write_table(pa.table({"filename": ["7.png"], "text": ["a"]}), torn)
    with pytest.raises(UserError, match=r"b\.parquet has no column 'caption', which the first file has"):
        found(LocalStorage(pets), path=str(pets / "tables"))
    with pytest.raises(UserError, match="the table cannot be read: neither") as missing:
        found(LocalStorage(pets), path="no.parquet")
    assert isinstance(missing.value.__cause__, MissingFileError)


def encoded(width: int, height: int, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.effect_noise((width, height), 99).convert("RGB").save(data, kind)
    return data.getvalue()


@pytest.mark.parametrize("kind", [LocalStorage, Remote])
def test_images_in_the_rows_of_parquet_files(tmp_path: Path, kind) -> None:
    images = [encoded(8, 9), encoded(16, 8, "JPEG"), None, b"nothing", encoded(4, 4, "WEBP")]
    rows = [{"bytes": data, "path": "x"} for data in images]
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"image": rows, "text": list("abcde")}), tmp_path / "sub" / "p.parquet", row_group_size=2)
    storage = kind(tmp_path)
    source = open_parquet(spec_of(image_column="image"), storage)
    listed = list(source.list())
    assert [(one.key, one.captions, one.width, one.height) for one in listed] == [
        ("sub/p.parquet/000000000.png", ("a",), 8, 9),
        ("sub/p.parquet/000000001.jpg", ("b",), 16, 8),
        ("sub/p.parquet/000000002", None, None, None),
        ("sub/p.parquet/000000003", None, None, None),
        ("sub/p.parquet/000000004.webp", ("e",), 4, 4),
    ]
    assert [bool(one.problem) for one in listed] == [False, False, True, True, False]
    usable = [0, 1, 4]
    assert [source.read(listed[row].place) for row in usable] == [images[row] for row in usable]
    pq.write_table(pa.table({"image": rows[:2], "text": list("ab")}), tmp_path / "q.parquet")
    again = {one.key: one.etag for one in open_parquet(spec_of(image_column="image"), storage).list()}
    assert again["q.parquet/000000000.png"] == listed[0].etag, "the same image in another file is the same"


def test_reading_in_a_shuffled_order_is_refused_with_its_cost(tmp_path: Path, monkeypatch) -> None:
    images = [encoded(64, 64) for _ in range(8)]
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"image": images, "text": list("abcdefgh")}), tmp_path / "rows" / "p.parquet", row_group_size=4)
    entry = {"id": "rows", "instance_data_dir": str(tmp_path / "rows"), "metadata_backend": "parquet"}
    (tmp_path / "data.json").write_text(json.dumps([entry | {"parquet": {"image_column": "image"}}]))
    arguments = ["check", f"--data_backend_config={tmp_path}/data.json", "--vae_cache_disable", "--resolution=64"]
    arguments.append("--train_batch_size=8")
    assert "8 " in CliRunner().invoke(dataset, arguments, catch_exceptions=False).output
    monkeypatch.setattr(row_images, "MEMORY", 10_000)
    arguments.append(f"--output_dir={tmp_path}/run")
    for _ in range(2):  # the second scan finds nothing changed
        with pytest.raises(ConfigError, match=r"costs its row group: 0\.0 MB, for a batch of 8 0\.0 GB"):
            CliRunner().invoke(dataset, arguments, catch_exceptions=False)


def test_a_table_that_is_a_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    os.mkfifo(tmp_path / "table.parquet")
    os.mkfifo(tmp_path / "pets/metadata.parquet")
    for path in (str(tmp_path / "table.parquet"), "metadata.parquet"):
        with pytest.raises(UserError, match="not a regular file"):
            list(open_parquet(spec_of(path=path), LocalStorage(tmp_path / "pets")).list())
