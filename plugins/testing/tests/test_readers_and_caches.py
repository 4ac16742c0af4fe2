"""The contracts of metadata backends, checkpoint formats and caches refuse what is wrong: one fault at a time."""

from contextlib import nullcontext

import pytest

from smalti import CheckpointError, Cleared
from smalti.checkpoint import Contents, StoredTensor
from smalti.data import Listed, ListedState, MetadataSource
from smalti_testing import BrokenContract, check_cache, check_checkpoint_format, check_metadata_backend


class Kept:
    """A cache; `fault` is what is wrong with it."""

    place = "memory"

    def __init__(self, fault, held):
        self.fault, self.held = fault, held

    def entries(self):
        return len(self.held)

    def size(self):
        return 0 if self.fault == "size" else sum(map(len, self.held))

    def clear(self):
        cleared = Cleared(count=len(self.held), bytes=0 if self.fault == "told" else self.size())
        if self.fault != "kept":
            self.held.clear()
        return cleared


@pytest.mark.parametrize("fault", ["", "size", "told", "kept"])
def test_a_faulty_cache_is_found(fault):
    held = []
    with pytest.raises(BrokenContract) if fault else nullcontext():
        check_cache(lambda: Kept(fault, held), lambda cache: cache.held.append(b"1234"))


class Labels(MetadataSource):
    def __init__(self, fault):
        self.fault = fault
        self.listed_state = ListedState(digest="1")

    def list(self):
        keys = {"order": "ba", "twice": "aa"}.get(self.fault, "ab")
        return iter([Listed(key=key, size=1, etag="" if self.fault == "etag" else "1") for key in keys])

    def is_unchanged(self, before):
        return self.fault != "changed"


@pytest.mark.parametrize("fault", ["", "order", "twice", "etag", "changed"])
def test_a_faulty_metadata_backend_is_found(fault):
    with pytest.raises(BrokenContract) if fault else nullcontext():
        check_metadata_backend(lambda: Labels(fault))


class Copied:
    """The reader of a checkpoint that is one file of four bytes."""

    def __init__(self, fault, folder):
        self.fault, self.data = fault, (folder / "weights").read_bytes()
        if len(self.data) < 4 and fault != "damage":
            raise CheckpointError("too short")
        dtype = "uint8" if fault == "type" else "U8"
        name = "count" if fault == "name" else "model/count"
        step = float("nan") if fault == "json" else 3
        self.contents = Contents(tensors={name: StoredTensor(dtype=dtype, shape=(4,), chunks=1)}, step=step)

    def read(self, name):
        return [self.data[:2]] if self.fault == "short" else [self.data.ljust(4, b"-")]


@pytest.mark.parametrize("fault", ["", "type", "name", "json", "short", "damage"])
def test_a_faulty_checkpoint_format_is_found(fault, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights").write_bytes(b"1234")
    (tmp_path / "room").mkdir()
    with pytest.raises((BrokenContract, ValueError)) if fault else nullcontext():
        check_checkpoint_format(lambda folder: Copied(fault, folder), tmp_path / "checkpoint", tmp_path / "room")
