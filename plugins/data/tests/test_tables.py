"""Tables of captions: joined with the files of a folder, in bounded memory, with the same result as a dictionary."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from smalti.data import DatasetSpec
from smalti.data.storage.local import LocalStorage
from smalti.errors import ConfigError, UserError
from smalti_data.tables import join as join_module
from smalti_data.tables.columns import ROWS
from smalti_data.tables.csv_table import CsvSource
from smalti_data.tables.join import Join, Names


def spec_of(folder: Path, **values) -> DatasetSpec:
    values = {"metadata_backend": "csv", "caption_strategy": "csv"} | values
    return DatasetSpec(id="pets", instance_data_dir=folder, **values)


def write(path: Path, header: str, *rows: tuple[str, ...]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def listed(folder: Path, lists: Path | None = None, **values) -> tuple[dict[str, tuple], CsvSource]:
    """Captions and size by key, and the source."""
    source = CsvSource(spec_of(folder, **values), LocalStorage(folder))
    if lists is not None:
        source.use_folder(lists)
    found = {one.key: (one.captions, one.width, one.height) for one in source.list()}
    return found, source


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    folder = tmp_path / "pets"
    (folder / "dogs").mkdir(parents=True)
    for name in ("cat.jpg", "cat.b.png", "dogs/rex.webp", "lost.jpg"):
        (folder / name).write_bytes(b"image")
    return folder


def test_rows_and_files_are_joined_and_what_is_only_in_one_of_them_is_listed(pets, tmp_path) -> None:
    write(
        pets / "metadata.csv",
        "filename,caption,width,height",
        ("dogs/rex.webp", 'a dog, "Rex"', "640", "480"),
        ("./cat.jpg", " a cat ", "", ""),
        (f"{pets}/cat.b.png", "", "64", "64"),
        ("gone.jpg", "nothing", "1", "1"),
        ("cat.jpg", "again", "2", "2"),
        ("", "nameless", "3", "3"),
    )
    found, source = listed(pets, tmp_path / "lists")
    assert found == {
        "cat.b.png": ((), 64, 64),
        "cat.jpg": (("a cat",), None, None),
        "dogs/rex.webp": (('a dog, "Rex"',), 640, 480),
    }
    notices = "\n".join(source.notices)
    assert "rows without an image: 1, first: gone.jpg" in notices
    assert "images without a row, which are left out: 1, first: lost.jpg" in notices
    assert "1 rows name an image of an earlier row" in notices
    assert "1 rows name no image" in notices
    assert (tmp_path / "lists" / "rows-without-file.txt").read_text() == "gone.jpg\n"
    assert (tmp_path / "lists" / "files-without-row.txt").read_text() == "lost.jpg\n"
    assert sorted(path.name for path in (tmp_path / "lists").iterdir()) == ["files-without-row.txt", "rows-without-file.txt"]


def test_names_without_an_extension_are_recognized(pets) -> None:
    write(pets / "metadata.csv", "filename,caption", ("cat", "a cat"), ("cat.b", "b"), ("dogs/rex", "a dog"))
    assert {key: captions for key, (captions, _, _) in listed(pets)[0].items()} == {
        "cat.jpg": ("a cat",),
        "cat.b.png": ("b",),
        "dogs/rex.webp": ("a dog",),
    }


def test_several_columns_of_captions(pets) -> None:
    write(pets / "metadata.csv", "filename,long,short,alt", ("cat.jpg", "a long cat", "cat", "x"), ("lost.jpg", "", "", "alt"))
    for columns, expected in (
        (["long", "short"], {"cat.jpg": ("a long cat", "cat"), "lost.jpg": ("alt",)}),
        ({"short": 1, "long": 2}, {"cat.jpg": ("cat", "a long cat"), "lost.jpg": ("alt", "")}),
    ):
        found, _ = listed(pets, metadata_options={"caption_column": columns, "fallback_caption_column": "alt"})
        assert {key: captions for key, (captions, _, _) in found.items()} == expected


def test_captions_of_text_files_with_sizes_of_a_table(pets) -> None:
    write(pets / "metadata.csv", "filename,width,height", ("cat.jpg", "64", "32"), ("lost.jpg", "8", "8"))
    (pets / "cat.txt").write_text("a cat")
    source = CsvSource(spec_of(pets, caption_strategy="textfile"), LocalStorage(pets))
    etag = LocalStorage(pets).stat("cat.txt").etag
    assert [(one.key, one.captions, one.caption_etag) for one in source.list()] == [
        ("cat.jpg", None, etag),
        ("lost.jpg", None, ""),
    ]


@pytest.mark.parametrize(
    ("header", "row", "options", "message"),
    [
        ("file,caption", ("cat.jpg", "x"), {}, r"has no column 'filename'.*\n?.*file, caption"),
        ("filename,caption", ("cat.jpg", "x"), {"caption_column": ["caption", "no"]}, "has no column 'no'"),
        ("filename,caption,width,height", ("cat.jpg", "x", "wide", "1"), {}, "column 'width', where whole numbers of pixels"),
        ("filename,caption,width,height", ("cat.jpg", "x", "1.5", "1"), {}, "no whole numbers of pixels"),
        ("filename,caption", ("nothing.jpg", "x"), {}, "the table names 'nothing.jpg', there is 'cat.b.png'"),
        ("filename,caption", ("cat.jpg",), {}, "cannot be read|not a readable CSV"),
        ("filename,caption", ("", "x"), {}, "no row with a file name"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_reason(pets, header, row, options, message) -> None:
    write(pets / "metadata.csv", header, row)
    with pytest.raises(UserError, match=message) as error:
        listed(pets, metadata_options=options)
    assert error.value.fix


def test_wrong_keys_and_a_missing_table(pets) -> None:
    with pytest.raises(ConfigError, match="unknown key 'colum'"):
        listed(pets, metadata_options={"colum": "x"})
    with pytest.raises(UserError, match=r"no\.csv"):
        listed(pets, metadata_options={"path": "no.csv"})


NAMES = st.sampled_from([f"{a}{b}{c}" for a in ("", "d/", "d-/") for b in ("a", "a.b", "a-b", "é", "a.b.c") for c in ("", "0")])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(NAMES, st.sampled_from(["", "x", "y"]), st.integers(1, 3)), max_size=30),
    files=st.sets(st.tuples(NAMES, st.sampled_from([".jpg", ".png"]))),
    window=st.integers(1, 5),
    most=st.integers(1, 9),
    by_stem=st.booleans(),
)
def test_any_join_is_the_same_as_with_a_dictionary(tmp_path_factory, rows, files, window, most, by_stem) -> None:
    rows = [(name if by_stem else f"{name}.jpg", caption, width) for name, caption, width in rows]
    keys = sorted(name + extension for name, extension in files)
    wanted: dict[str, tuple[str, int]] = {}
    for name, caption, width in rows:
        wanted.setdefault(name, (caption, width))
    expected = [(key, *wanted[stem]) for key in keys if (stem := key.rpartition(".")[0] if by_stem else key) in wanted]
    used = {key.rpartition(".")[0] if by_stem else key for key, _, _ in expected}

    folder = tmp_path_factory.mktemp("join")
    lost, unlisted = Names(folder / "lost"), Names(folder / "unlisted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_module, "_MOST", most)
        patch.setattr(join_module, "RUN", 4)
        join = Join(folder, by_stem=by_stem, rows_without_file=lost, files_without_row=unlisted)
        values = [[name for name, _, _ in rows], [[caption] for _, caption, _ in rows], *([[w for _, _, w in rows]] * 2)]
        join.add(pa.RecordBatch.from_arrays([pa.array(v, f.type) for v, f in zip(values, ROWS, strict=True)], schema=ROWS))

        def listing() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(keys), window):
                yield pa.RecordBatch.from_pydict({"key": pa.array(keys[start : start + window], pa.string())})

        found = [
            (key, row["captions"][0], row["width"])
            for left, right in join.results(listing())
            for key, row in zip(left.column("key").to_pylist(), right.to_pylist(), strict=True)
        ]
    lost.close()
    unlisted.close()
    assert found == expected
    assert join.duplicates == len(rows) - len(wanted)
    assert lines(folder / "lost") == sorted(wanted.keys() - used)
    assert lines(folder / "unlisted") == sorted(set(keys) - {key for key, _, _ in expected})


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_table_that_is_a_pipe_is_told_and_not_waited_for(pets, tmp_path) -> None:
    os.mkfifo(tmp_path / "table.csv")
    with pytest.raises(UserError, match=r"table\.csv cannot be read: not a regular file"):
        listed(pets, metadata_options={"path": str(tmp_path / "table.csv")})
    os.mkfifo(pets / "metadata.csv")
    with pytest.raises(UserError, match="Empty CSV file"):
        listed(pets)
