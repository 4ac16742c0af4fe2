"""The index of a dataset with a JSON-lines table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from smalti.data import DataDefaults, LocalStorage, catalog_of, parse_datasets
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.errors import ConfigError, UserError
from smalti.plugins import load_plugins

CATALOG = catalog_of(load_plugins())


def image(path: Path, width: int = 12, height: int = 8, caption: str | None = "a thing") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "red").save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


class CountingStorage(LocalStorage):
    """A folder that notes what is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def read(self, key: str) -> bytes:
        self.opened.append(key)
        return super().read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.opened.append(key)
        return super().read_range(key, start, length)


def build(folder: Path, storage: LocalStorage | None = None, **values: object) -> DatasetIndex:
    entry = {"id": "pets", "instance_data_dir": str(folder), "metadata_backend": "json", **values}
    (spec,), problems = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
    assert not problems
    storage = storage or LocalStorage(folder)
    return build_index(spec, storage, CATALOG.open_source(spec, storage), None)


def healthy(index: DatasetIndex) -> list[str]:
    return [index.key(row) for row in range(len(index)) if index.size(row) != (0, 0)]


def sizes(index: DatasetIndex) -> list[tuple[int, int]]:
    return [index.size(row) for row in range(len(index))]


def reasons(index: DatasetIndex) -> dict[str, str]:
    return {item.key: item.reason for item in index.quarantined}


def table(folder: Path, *rows: dict[str, object]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def test_a_json_table_gives_sizes_and_captions_without_opening_pictures(tmp_path: Path) -> None:
    image(tmp_path / "a.png", caption=None)
    image(tmp_path / "sub/b.png", caption=None)
    table(
        tmp_path,
        {"filename": "sub/b.png", "caption": ["one", "two"], "width": 640, "height": 480},
        {"filename": "./a.png", "caption": "an ant", "width": 320, "height": 240},
    )
    storage = CountingStorage(tmp_path)
    index = build(tmp_path, storage=storage)

    assert storage.opened == ["metadata.jsonl"]
    assert (sizes(index), index.captions(0), index.captions(1)) == ([(320, 240), (640, 480)], ("an ant",), ("one", "two"))


def test_a_json_table_may_leave_out_sizes_and_captions(tmp_path: Path) -> None:
    image(tmp_path / "a.png", 30, 20, "from the file")
    table(tmp_path, {"filename": "a.png"})

    assert build(tmp_path, caption_strategy="textfile").captions(0) == ("from the file",)
    assert reasons(build(tmp_path)) == {"a.png": "no caption under 'caption' in the table"}


def test_a_table_names_what_belongs_to_the_dataset(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    image(tmp_path / "unlisted.png")
    table(tmp_path, {"filename": "a.png", "caption": "x"}, {"filename": "gone.png", "caption": "y"})
    index = build(tmp_path)

    assert healthy(index) == ["a.png"]
    assert "the image is missing" in reasons(index)["gone.png"]


def test_a_faulty_table_is_told_with_its_lines(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"filename": "a.png"}\n{oops\n{"caption": 1}\n{"filename": "b", "width": "wide"}\n' + "[" * 100_000 + "\n"
    )

    with pytest.raises(ConfigError) as caught:
        build(tmp_path)

    assert [problem.where.rpartition(", ")[2] for problem in caught.value.problems] == ["line 2", "line 3", "line 4", "line 5"]
    assert caught.value.problems[-1].message == "nested too deeply"


def test_a_table_with_other_columns_is_reported_with_their_names(tmp_path: Path) -> None:
    table(tmp_path, {"file_name": "a.png", "text": "a cat"})
    image(tmp_path / "a.png", 30, 20)

    with pytest.raises(ConfigError, match="no file name under 'filename'; the columns are file_name, text") as caught:
        build(tmp_path)
    assert caught.value.problems[0].fix == 'name the columns: "json": {"filename_column": ..., "caption_column": ...}'
    columns = {"filename_column": "file_name", "caption_column": "text"}
    assert build(tmp_path, json=columns).captions(0) == ("a cat",)


def test_a_missing_table_says_where_it_was_looked_for(tmp_path: Path) -> None:
    image(tmp_path / "a.png")

    with pytest.raises(UserError, match=r"metadata\.jsonl cannot be read"):
        build(tmp_path)
