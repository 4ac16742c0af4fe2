"""Images of parquet files are written as they are, once, and never over something else."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from smalti.errors import UserError
from smalti_data.parquet_images import Columns, choose_columns, parquet_files, unpack

COLUMNS = Columns(image="image", caption="text")


def encoded(number: int, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, dtype=np.uint8)).save(data, kind)
    return data.getvalue()


def parquet(path: Path, images: list[bytes | None], **columns: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": data, "path": f"{number}.x"} for number, data in enumerate(images)]
    pq.write_table(pa.table({"image": rows, **columns}), path, row_group_size=2)
    return path


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write(sources: list[Path], folder: Path, columns: Columns = COLUMNS, most: int | None = None):
    return unpack(parquet_files(sources), folder, columns, most=most, progress=lambda count: None)


def test_images_are_numbered_through_all_files_with_their_captions(tmp_path: Path) -> None:
    images = [encoded(1), encoded(2, "JPEG"), encoded(3, "WEBP")]
    parquet(tmp_path / "hub" / "train" / "0000.parquet", images[:2], text=["one", "two\nlines"])
    parquet(tmp_path / "hub" / "train" / "0001.parquet", images[2:], text=[""])
    done = write([tmp_path / "hub"], tmp_path / "out")

    assert (done.images, done.present, done.unusable) == (3, 0, {})
    assert written(tmp_path / "out") == {
        "00000000.png": images[0],
        "00000000.txt": b"one\n",
        "00000001.jpg": images[1],
        "00000001.txt": b"two lines\n",
        "00000002.webp": images[2],
    }


def test_several_captions_become_several_lines_also_from_inside_a_struct(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [encoded(1)], about=[{"long": ["a cat", "a red cat"], "short": "cat"}])
    write([file], tmp_path / "out", Columns(image="image", caption="about.long"))

    assert written(tmp_path / "out")["00000000.txt"] == b"a cat\na red cat\n"


def test_rows_without_a_readable_image_are_left_out_and_keep_their_number(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [None, b"no image", encoded(1)], text=["x", "y", "z"])
    done = write([file], tmp_path / "out")

    assert done.unusable == {
        "a.parquet, row 0": "no image in the file, perhaps only its address",
        "a.parquet, row 1": "not an image that can be read",
    }
    assert set(written(tmp_path / "out")) == {"00000002.png", "00000002.txt"}


def test_it_continues_after_an_interruption_and_overwrites_nothing(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [encoded(number) for number in range(5)], text=list("abcde"))
    write([file], tmp_path / "out", most=2)
    done = write([file], tmp_path / "out")
    (tmp_path / "out" / "00000003.txt").write_text("my own caption")

    assert (done.images, done.present, len(written(tmp_path / "out"))) == (5, 2, 10)
    with pytest.raises(UserError, match=r"00000003\.txt exists with another content"):
        write([file], tmp_path / "out")
    assert (tmp_path / "out" / "00000003.txt").read_text() == "my own caption"


def test_the_only_columns_that_can_be_meant_are_chosen(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [encoded(1)], text=["a"], width=[3])
    several = parquet(tmp_path / "b.parquet", [encoded(1)], text=["a"], tags=[{"all": ["b"]}])

    assert choose_columns(file, None, None) == COLUMNS
    assert choose_columns(several, None, None, captions=False) == Columns(image="image", caption=None)
    with pytest.raises(UserError, match="several columns that may be the caption") as raised:
        choose_columns(several, None, None)
    assert raised.value.fix == "give --caption_column=text or --caption_column=tags.all or --no_captions"
    with pytest.raises(UserError, match="no captions in 'width'"):
        choose_columns(file, None, "width")


def test_a_damaged_file_is_named_with_the_row(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [encoded(number) for number in range(4)], text=list("abcd"))
    data = bytearray(file.read_bytes())
    data[4:200] = bytes(196)
    file.write_bytes(data)

    with pytest.raises(UserError, match=r"a\.parquet cannot be read from row 0 on"):
        write([file], tmp_path / "out")
    with pytest.raises(UserError, match="no parquet file in"):
        parquet_files([tmp_path / "out"])
