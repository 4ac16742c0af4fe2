"""Images of one dataset that another one has too: counted right however the folders and sizes relate."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.scan import index_file, overlap as module
from smalti.data.scan.index import DatasetIndex
from smalti.data.scan.index_file import SCHEMA, IndexFile, IndexWriter
from smalti.data.scan.overlap import overlap

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
