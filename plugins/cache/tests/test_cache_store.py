"""Stores of cached entries: keys by columns, packs, damaged entries, large stores, and caches of earlier versions."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings, strategies as st

import smalti_cache.directory
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import AccessDeniedError, IntegrityError
from smalti.errors import UserError
from smalti_cache.earlier import EarlierParts
from smalti_cache.entries import decode, encode
from smalti_cache.keys import Hasher, Keys, single_key
from smalti_cache.pack import PackBuilder
from smalti_cache.store import PackStore
from support.cache_parts import earlier_part

ROW = st.tuples(st.text(max_size=20), st.text(max_size=9), st.integers(-(2**63), 2**63 - 1))


def text_keys(texts: list[str], *what: str) -> Keys:
    return Hasher(len(texts), *what).texts(pa.array(texts, type=pa.string())).keys()


def store_of(root: Path, entries, **options) -> PackStore:
    store = PackStore(LocalStorage(root), "packs", **options)
    pack = PackBuilder(compress=store.compress)
    for key, entry in entries.items():
        pack.add(key, entry)
    if entries:
        store.put(pack)
    store.refresh()
    return store


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("packs/*.safetensors"))


@settings(max_examples=50, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=8), st.data())
def test_keys_of_columns_are_those_of_single_rows_and_depend_on_every_value(rows, data):
    names, etags, numbers = zip(*rows, strict=True)
    padded = pa.array(["before", *names, "after"]).slice(1, len(rows))  # a slice, as an index yields it
    column = np.array(numbers, dtype=np.int64)
    keys = Hasher(len(rows), "images").texts(padded).texts(pa.array(etags)).numbers(column).keys()
    found = [keys.key(place) for place in range(len(rows))]

    assert found == [single_key(("images",), *row) for row in rows]
    assert len(set(found)) == len(set(rows))
    name, etag, number = data.draw(st.sampled_from(rows))
    others = {(name, etag, number + 1), (name + "\0", etag, number), (name, etag + "x", number), (name + etag, "", number)}
    others |= {(name[:place] + "y" + name[place + 1 :], etag, number) for place in range(len(name))}
    assert single_key(("images",), name, etag, number) not in {
        single_key(("images",), *other) for other in others - {(name, etag, number)}
    }


def test_a_million_names_that_differ_in_few_characters_have_different_halves():
    numbers = np.arange(1 << 18)
    names = [f"shard-{number >> 10:05}/{number:09}.jpg" for number in numbers.tolist()]
    keys = text_keys([*names, *(f"{name}.txt" for name in names)], "images")
    assert len(np.unique(keys.high)) == len(np.unique(keys.low)) == 2 * len(names)
    counts = np.bincount((keys.high >> np.uint64(56)).astype(np.int64), minlength=256)
    assert abs(counts - 2048).max() < 300  # 6 standard deviations


@pytest.mark.parametrize("compress", [False, True])
def test_entries_are_read_as_they_were_written_bit_for_bit(compress):
    padded = torch.cat([torch.randn(5, 4), torch.full((1, 4), float("nan")).expand(7, 4)]).to(torch.bfloat16)
    entry = {
        "rows": padded,
        "all_alike": torch.ones(9, 3),
        "latents": torch.randn(4, 8, 8),
        "mask": torch.tensor(1),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }
    form, stored = encode(entry, compress=compress)
    read = decode(form, stored)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in read.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in entry.items()
    }
    for name, tensor in entry.items():
        assert read[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert sum(tensor.nbytes for tensor in entry.values()) - form.size == 6 * 4 * 2 + 8 * 3 * 4


def test_switching_compression_leaves_what_is_there(tmp_path):
    entry = {"rows": torch.arange(2000.0)}
    store_of(tmp_path, {(1, 1): entry}, compress=True)
    store_of(tmp_path, {(2, 2): entry})
    store = store_of(tmp_path, {}, compress=True)
    assert all(torch.equal(read["rows"], entry["rows"]) for read in store.get_many([(1, 1), (2, 2)]))
    small, large = sorted(path.stat().st_size for path in packs(tmp_path))
    assert small < large / 2
    with pytest.raises(KeyError):
        store.get((3, 3))


def test_a_damaged_entry_is_reported_and_then_missing_and_the_others_are_read(tmp_path):
    entries = {(1, number): {"rows": torch.full((50,), float(number))} for number in range(3)}
    store = store_of(tmp_path, entries)
    [pack] = packs(tmp_path)
    data = bytearray(pack.read_bytes())
    data[-250] ^= 4  # of the second entry
    pack.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"damaged at byte \d+: an entry does not match its checksum"):
        store.get((1, 1))
    assert torch.equal(store.get((1, 2))["rows"], entries[1, 2]["rows"])

    keys = Keys.of(list(entries))
    for each in (store, store_of(tmp_path, {})):
        assert each.has(keys).tolist() == [True, False, True]
    again = store_of(tmp_path, {(1, 1): entries[1, 1]})
    assert again.has(keys).all()
    assert torch.equal(again.get((1, 1))["rows"], entries[1, 1]["rows"])
    assert pack.read_bytes() == data


def test_a_large_store_is_merged_into_one_mapped_file_and_later_packs_are_found_too(tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.directory, "IN_MEMORY", 50)
    monkeypatch.setattr(smalti_cache.directory, "_STEP", 7)
    merged = tmp_path / "node"
    keys = text_keys([f"{number}" for number in range(90)])
    half = Keys(keys.high // np.uint64(2**60), keys.low)  # upper halves that many keys share
    everything = [half.key(place) for place in range(90)]
    for start in range(0, 90, 30):
        store_of(tmp_path, {key: {"rows": torch.tensor([key[1] % 1000])} for key in everything[start : start + 30]})
    for _ in range(2):
        store = store_of(tmp_path, {}, folder=merged)
        assert len(list(merged.glob("*.index"))) == 1
        assert all(isinstance(column.base, np.memmap) for column in store.columns[0].values())
    more = {(7, number): {"rows": torch.tensor([number])} for number in range(3)}
    later = store_of(tmp_path, more, folder=merged)

    wanted = Keys.joined([half, Keys.of([*more, (7, 99), (2**64 - 1, 0)])])
    assert later.has(wanted).tolist() == [True] * 93 + [False] * 2
    assert [int(later.get(key)["rows"]) for key in everything] == [key[1] % 1000 for key in everything]
    assert int(later.get((7, 2))["rows"]) == 2


def links_to_folder(folder):
    folder.rmdir()
    folder.with_name("other").mkdir()
    folder.symlink_to(folder.with_name("other"))


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        (lambda folder: folder.chmod(0o770), "other users may write in"),
        (lambda folder: folder.parent.chmod(0o777), "other users may write in"),
        (links_to_folder, "is not a folder of this user"),
        (lambda folder: os.chown(folder, os.geteuid() + 1, -1), "is not a folder of this user"),
    ],
    ids=["writable", "in-writable", "link", "of-another-user"],
)
def test_the_index_stays_in_memory_where_other_users_could_change_it(tmp_path, monkeypatch, caplog, change, notice):
    monkeypatch.setattr(smalti_cache.directory, "IN_MEMORY", 1)
    for number in range(2):
        store_of(tmp_path, {(1, number): {"rows": torch.tensor([number])}})
    folder = tmp_path / "temporary" / "indexes"
    store_of(tmp_path, {}, folder=folder)
    [index] = folder.glob("*.index")
    index.unlink()  # as if somebody else had made the folder first
    try:
        change(folder)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")
    caplog.clear()
    store = store_of(tmp_path, {}, folder=folder)
    assert list(folder.glob("*")) == []
    assert [int(store.get((1, number))["rows"]) for number in range(2)] == [0, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert notice in caplog.text


def test_a_merged_index_that_other_users_could_have_changed_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.directory, "IN_MEMORY", 1)
    for number in range(2):
        store_of(tmp_path, {(1, number): {"rows": torch.tensor([number])}})
    folder = tmp_path / "indexes"
    store_of(tmp_path, {}, folder=folder)
    [index] = folder.glob("*.index")
    index.write_bytes(index.read_bytes()[:-40] + bytes(40))
    folder.chmod(0o777)
    store = store_of(tmp_path, {}, folder=folder)
    assert [int(store.get((1, number))["rows"]) for number in range(2)] == [0, 1]


def test_a_pack_that_cannot_be_read_is_named_and_kept(tmp_path):
    store_of(tmp_path, {(1, 1): {"rows": torch.zeros(3)}})
    [pack] = packs(tmp_path)
    pack.write_bytes(pack.read_bytes()[:-1])
    told = []
    store = store_of(tmp_path, {(2, 2): {"rows": torch.zeros(3)}}, report=told.append)
    assert store.has(Keys.of([(1, 1), (2, 2)])).tolist() == [False, True]
    assert str(pack) in told[0]
    assert "its size does not match its header" in told[0]
    assert pack.exists()


def test_entries_of_earlier_versions_are_read_by_reference(tmp_path):
    (tmp_path / "packs").mkdir()
    entries = {f"{number:032x}": {"corner": torch.tensor([number, 2]), "x": torch.randn(3)} for number in range(4)}
    earlier_part(tmp_path / "packs" / "old.safetensors", entries)
    (tmp_path / "packs" / "torn.safetensors").write_bytes(b"\0" * 7)
    store = store_of(tmp_path, {}, report=json.dumps)
    parts = EarlierParts(store.earlier_parts, store.read)
    pairs = [((1, number), key) for number, key in enumerate(entries) if key in parts]
    store.put_references(parts.references(pairs))
    store.refresh()

    assert list(store.earlier_parts) == ["old.safetensors"]
    for now, key in pairs:
        read = store.get(now)
        assert all(torch.equal(read[name], tensor) for name, tensor in entries[key].items())
    assert len(pairs) == 4


class ReadOnly:
    """In place of a bucket that may not be written to."""

    location = "s3://bucket"

    def write(self, key, data):
        raise AccessDeniedError(f"{key}: permission denied (403)", fix="the key needs s3:PutObject")


def test_a_storage_that_refuses_a_pack_says_itself_what_to_do():
    pack = PackBuilder()
    pack.add((1, 2), {"x": torch.zeros(1)})
    with pytest.raises(UserError, match="cannot write 1 entries") as caught:
        PackStore(ReadOnly(), "packs").put(pack)
    assert "s3:PutObject" in caught.value.fix
    assert "--cache_dir" not in caught.value.fix
