"""JSON-lines tables: blocks read as columns say the same as line by line, whatever is in them."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from smalti.data import DataDefaults, catalog_of, parse_datasets
from smalti.data.datasets.sources import Listed
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.storage.local import LocalStorage
from smalti.errors import ConfigError
from smalti.plugins import load_plugins
from smalti_data import json_table
from smalti_data.json_table import JsonLines, open_json

CATALOG = catalog_of(load_plugins())

NAMES = [f"{folder}{number}.png" for folder in ("", "a/", "a.b/", "é/") for number in range(6)]
TEXTS = st.sampled_from(["one", " two \u00a0", "", " ", "drei \U0001f600", 'with "quotes" and \\'])
CAPTIONS = st.one_of(TEXTS, st.lists(TEXTS, max_size=3), st.none())
PIXELS = st.sampled_from([None, 1, 640, 480.0])
Row = tuple[str, object, object, object, str]
ROWS = st.lists(
    st.tuples(st.sampled_from(NAMES), CAPTIONS, PIXELS, PIXELS, st.sampled_from(["", "./", "\n", "extra"])),
    max_size=12,
    unique_by=lambda row: row[0],
)


def spec_of(folder: Path) -> DatasetSpec:
    entry = {"id": "pets", "instance_data_dir": str(folder), "metadata_backend": "json"}
    specs, problems = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
    assert not problems
    return specs[0]


def text_of(rows: list[Row]) -> Iterator[str]:
    for name, caption, width, height, twist in rows:
        yield "\n" if twist == "\n" else ""
        row = {"filename": ("./" if twist == "./" else "") + name, "width": width, "height": height, "caption": caption}
        if twist == "extra":
            row |= {"other": [{"deep": 1}], "width": row["width"]}
        yield json.dumps({key: value for key, value in row.items() if value is not None}, ensure_ascii=twist == "") + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pets")
    for name in NAMES[::2]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"?" * len(name))
        (folder / name).with_suffix(".txt").write_text("text")
    return folder


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, chunk=st.sampled_from([40, 200, 1 << 20]))
def test_any_table_gives_the_rows_of_its_lines(folder: Path, rows: list[Row], chunk: int) -> None:
    (folder / "metadata.jsonl").write_text("".join(text_of(rows)), encoding="utf-8")
    storage = LocalStorage(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_table, "_CHUNK", chunk)
        listed = list(JsonLines(spec_of(folder), storage).list())

    def expected(name: str, caption: object, width: float | None, height: float | None) -> Listed:
        texts = None if caption is None else [caption] if isinstance(caption, str) else caption
        captions = None if texts is None else tuple(text.strip() for text in texts if text.strip())
        size = {"width": width and int(width), "height": height and int(height)}
        if name not in NAMES[::2]:
            missing = f"listed in {folder}/metadata.jsonl, but the image is missing"
            return Listed(key=name, size=0, etag="", captions=captions, problem=missing, **size)
        file, text = storage.stat(name), storage.stat(f"{posixpath.splitext(name)[0]}.txt")
        return Listed(key=name, size=file.size, etag=file.etag, captions=captions, caption_etag=text.etag, **size)

    assert listed == [expected(*row[:4]) for row in sorted(rows, key=lambda row: row[0])]


def test_faulty_lines_are_reported_from_any_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = "".join(f'{{"filename": "{number}.png"}}\n' for number in range(30))
    (folder / "metadata.jsonl").write_text(f'{good}{{"filename": "x.png", "width": 1.5}}\n\n{{oops\n')
    monkeypatch.setattr(json_table, "_CHUNK", 64)

    with pytest.raises(ConfigError) as caught:
        list(JsonLines(spec_of(folder), LocalStorage(folder)).list())
    assert [problem.where.rpartition(", ")[2] for problem in caught.value.problems] == ["line 31", "line 33"]


def test_an_image_in_two_lines_is_an_error(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"filename": "0.png"}\n{"filename": "1.png"}\n{"filename": "./0.png"}\n')

    with pytest.raises(ConfigError, match=r"'0\.png' occurs twice") as caught:
        list(JsonLines(spec_of(folder), LocalStorage(folder)).list())
    assert caught.value.problems[0].where.endswith("line 3")


@pytest.mark.parametrize("line_by_line", [False, True])
def test_several_caption_columns_are_read_as_in_other_tables(folder: Path, line_by_line: bool) -> None:
    rows = [
        {"filename": NAMES[0], "long": " a red cat ", "short": "cat"},
        {"filename": NAMES[2], "short": "dog"},
        {"filename": NAMES[4], "other": "an animal"},
        {"filename": NAMES[6]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(("\n" if line_by_line else "") + text)

    def captions(caption_column: object, **others: object) -> list[tuple[str, ...] | None]:
        block = {"caption_column": caption_column} | others
        entry = {"id": "pets", "instance_data_dir": str(folder), "metadata_backend": "json", "json": block}
        (spec,), problems = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=CATALOG)
        assert not problems
        found = {one.key: one.captions or () for one in JsonLines(spec, LocalStorage(folder)).list()}
        return [found[str(row["filename"])] for row in rows]

    assert captions(["long", "short"]) == [("a red cat", "cat"), ("dog",), (), ()]
    assert captions({"long": 1, "short": 3}) == [("a red cat", "cat"), ("", "dog"), (), ()]
    assert captions("long", fallback_caption_column="short") == [("a red cat",), ("dog",), (), ()]
    assert captions({"long": 1, "short": 3}, fallback_caption_column="other") == [
        ("a red cat", "cat"), ("", "dog"), ("an animal", ""), (),
    ]  # fmt: skip


def test_names_without_an_extension_are_those_of_the_files(tmp_path: Path) -> None:
    for name in ("7.png", "7.b.jpg", "d/8.webp", "other.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"image")
    rows = [("d/8", ["eight", ""], 640), ("7", "seven", None), ("7.b", None, None), ("9", "nine", 1)]
    lines = (
        json.dumps({"filename": name, "caption": caption, "width": width, "height": width}) for name, caption, width in rows
    )
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    entry = {"id": "pets", "instance_data_dir": str(tmp_path), "metadata_backend": "json"}
    block = {"identifier_includes_extension": False, "caption_column": ["caption"]}
    specs, problems = parse_datasets([{**entry, "json": block}], where="", defaults=DataDefaults(), catalog=CATALOG)
    assert not problems
    source = open_json(specs[0], LocalStorage(tmp_path))
    source.use_folder(tmp_path / ".lists")
    found = {one.key: (one.captions, one.width, one.problem) for one in source.list()}
    assert found == {"7.b.jpg": ((), None, ""), "7.png": (("seven",), None, ""), "d/8.webp": (("eight",), 640, "")}
    assert "rows without an image: 1, first: 9" in source.notices[0]
    assert "images without a row, which are left out: 1, first: other.png" in source.notices[1]
    assert source.is_unchanged(source.listed_state)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"filename": "7", "caption": "other"}))
    assert not source.is_unchanged(source.listed_state)
    (tmp_path / "metadata.jsonl").write_text('{"filename": "7"}\n{"filename": ')
    with pytest.raises(ConfigError, match="line 2"):
        list(source.list())
