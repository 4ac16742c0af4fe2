"""Indexes of an earlier format, whose digests of contents are of more bytes than today's."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.scan.build import build_index
from smalti.data.scan.changes import changes
from smalti.data.scan.identity import Identity
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import reusable_recipes
from smalti.data.storage.local import LocalStorage

OF_MORE_BYTES = 12345


def scanned(folder: Path, cache: Path) -> tuple[DatasetIndex, bytes]:
    """The index, and the recipe of the earlier format."""
    entry = {"id": "pets", "instance_data_dir": str(folder), "caption_strategy": "filename"}
    [spec], _ = parse_datasets([entry], where="", defaults=DataDefaults())
    storage = LocalStorage(folder)
    return build_index(spec, storage, Catalog().open_source(spec, storage), cache), reusable_recipes(spec)[-1]


def write_as_earlier(index: DatasetIndex, recipe: bytes, path: Path) -> None:
    """The same rows as format 2 had them: without places, and the content of the long file another digest."""
    table = index.table.drop_columns(["place"])
    content = [OF_MORE_BYTES if size > 16 * 1024 else content for size, content in rows(table)]
    table = table.set_column(table.schema.get_field_index("content"), "content", pa.array(content, pa.int64()))
    table = table.replace_schema_metadata({"smalti": recipe})
    path.unlink(missing_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def rows(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table.column("size").to_pylist(), table.column("content").to_pylist(), strict=True))


def test_contents_that_were_digested_otherwise_are_unknown_and_no_change(tmp_path: Path) -> None:
    folder, cache = tmp_path / "images", tmp_path / "pets.arrow"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "long.png")
    Image.new("RGB", (8, 8)).save(folder / "short.png")
    index, recipe = scanned(folder, cache)
    long, short = rows(index.table)
    assert long[1] != 0 != short[1]
    write_as_earlier(index, recipe, cache)

    taken_over, _ = scanned(folder, cache)
    assert rows(taken_over.table) == [(long[0], 0), short]

    then = Identity(order="", samples="0" * 64, settings={"pets": {}})
    kept = tmp_path / "trained" / then.samples[:16]
    kept.mkdir(parents=True)
    write_as_earlier(index, recipe, kept / "pets.arrow")
    assert changes(then, [index], tmp_path) == []
    Image.new("RGB", (8, 8), "red").save(folder / "short.png")
    assert changes(then, [scanned(folder, tmp_path / "new.arrow")[0]], tmp_path) == [
        "1 image has other content, first: short.png"
    ]
