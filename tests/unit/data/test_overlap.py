"""Images of one dataset that another one has too: counted right however the folders and sizes relate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from smalti.data.dataset import Dataset
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.prepared import build_datasets, check_no_overlap
from smalti.data.scan import index_file, overlap as module
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter
from smalti.data.scan.overlap import overlap
from smalti.errors import PreflightError

EMPTY = {
    "etag": "",
    "size": 1,
    "width": 8,
    "height": 8,
    "captions": [],
    "caption_etag": "",
    "content": 0,
    "caption_hash": 0,
    "place": "",
    "problem": "",
}
keys = st.sets(
    st.sampled_from([f"{folder}{name}" for folder in ("", "eval/", "eval0", "z/") for name in "abcdefg"]), min_size=1
)


def index_of(keys: Sequence[str]) -> DatasetIndex:
    sink = pa.BufferOutputStream()
    with IndexWriter(sink, b"") as writer:
        writer.write(pa.RecordBatch.from_pylist([{"key": key, **EMPTY} for key in sorted(keys)], schema=SCHEMA))
    file = IndexFile(sink.getvalue())
    assert file.summary is not None
    return DatasetIndex("photos", file, file.summary)


@pytest.mark.parametrize("few", [0, 2, 1000], ids=["searched", "either", "compared"])
@settings(deadline=None, max_examples=40)
@given(one=keys, other=keys, folder=st.sampled_from(["", "eval/", "none/"]))
def test_the_keys_in_both_are_counted(few: int, one: set[str], other: set[str], folder: str) -> None:
    both = sorted(one & {folder + key for key in other})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW", few)
        patch.setattr(index_file, "BATCH_ROWS", 3)
        found = overlap(index_of(list(one)), index_of(list(other)), folder)

    assert found.count == len(both)
    assert (found.first in both or found.first in {key.removeprefix(folder) for key in both}) == bool(both)


# --- datasets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("all/1.png", "all/eval/2.png", "all/eval/3.png", "all-others/2.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    (tmp_path / "link").symlink_to(tmp_path / "all")
    return tmp_path


def datasets_of(folder: Path) -> tuple[Dataset, ...]:
    entries = [{"id": folder.name, "instance_data_dir": str(folder), "caption_strategy": "filename"}]
    specs, problems = parse_datasets(entries, where="data.json", defaults=DataDefaults(resolution=16))
    assert problems == ()
    return build_datasets(specs, Catalog())


@pytest.mark.parametrize(
    ("training", "held_out", "count", "first"),
    [("all", "all/eval", 2, "eval/2.png"), ("all/eval", "link", 2, "eval/2.png"), ("link", "all", 3, "1.png")],
)
def test_held_out_images_that_are_trained_on_are_found(
    folder: Path, training: str, held_out: str, count: int, first: str
) -> None:
    with pytest.raises(PreflightError, match=f"^{count} images of the eval datasets are also in the training .*: {first}\n"):
        check_no_overlap(datasets_of(folder / training), datasets_of(folder / held_out))


def test_other_folders_have_nothing_in_common_whatever_their_names(folder: Path) -> None:
    check_no_overlap(datasets_of(folder / "all-others"), datasets_of(folder / "all"))
    check_no_overlap(datasets_of(folder / "all"), datasets_of(folder / "all-others"))
