"""A folder as a storage: keys, order, errors, atomic writes."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import InvalidKeyError, MissingFileError, checked_key

settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")


def fill(root: Path, *keys: str) -> LocalStorage:
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(key)
    return LocalStorage(root)


def test_files_are_listed_in_the_order_of_their_whole_keys(tmp_path: Path) -> None:
    keys = ["a/x.png", "a-b.png", "a.png", "a0.png", "B/y.png", "a/b/z.png", "ä.png"]
    storage = fill(tmp_path, *keys)

    assert [file.key for file in storage.list()] == sorted(keys)


def test_a_prefix_is_text_and_not_a_folder(tmp_path: Path) -> None:
    storage = fill(tmp_path, "cats/1", "cats2", "cat", "dogs/cats", "ca/t")

    assert [file.key for file in storage.list("cats")] == ["cats/1", "cats2"]


def test_a_prefix_may_reach_into_a_folder(tmp_path: Path) -> None:
    storage = fill(tmp_path, "a/b1/x", "a/b2", "a/c", "b1")

    assert [file.key for file in storage.list("a/b")] == ["a/b1/x", "a/b2"]


def test_listing_a_prefix_that_is_not_there_gives_nothing(tmp_path: Path) -> None:
    assert list(fill(tmp_path, "a").list("no/such")) == []


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    storage = fill(tmp_path / "root", "a/x")
    fill(tmp_path / "elsewhere", "y")
    (tmp_path / "root/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/a/loop").symlink_to(tmp_path / "root")

    assert [file.key for file in storage.list()] == ["a/x", "linked/y"]


@pytest.mark.parametrize("key", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/.", "a\\b", "a\0b"])
def test_keys_that_could_leave_the_root_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidKeyError):
        LocalStorage(tmp_path).read(key)


@given(st.text("a./\\\0", max_size=8))
def test_whatever_key_is_accepted_stays_below_the_root(key: str) -> None:
    try:
        checked_key(key)
    except InvalidKeyError:
        return

    assert os.path.normpath(f"/place/{key}") == f"/place/{key}"


def test_a_missing_file_has_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        LocalStorage(tmp_path).read("nothing.png")


def test_a_missing_folder_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not a folder"):
        LocalStorage(tmp_path / "nothing")


def test_a_range_is_cut_off_at_the_end_of_the_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/b", b"0123456789")

    assert storage.read_range("a/b", 7, 100) == b"789"


def test_an_etag_changes_with_the_content(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a", b"one")
    before = storage.stat("a")
    storage.write("a", b"two!")

    assert storage.stat("a").etag != before.etag


def test_a_write_leaves_nothing_but_the_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("deep/file", b"one")
    storage.write("deep/file", b"two")

    assert [(path.name, path.read_bytes()) for path in (tmp_path / "deep").iterdir()] == [("file", b"two")]


def folders(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir()}


def test_folders_that_the_storage_created_go_with_their_last_file_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    storage = LocalStorage(tmp_path)
    for key in ("mine/a/one", "mine/a/two", "mine/empty/three", "new/deep/four"):
        storage.write(key, b"1")
    assert storage.create("new/other/five", b"1")
    storage.delete("mine/a/one")
    assert folders(tmp_path) == {"mine", "mine/a", "mine/empty", "new", "new/deep", "new/other"}
    for key in ("mine/a/two", "mine/empty/three", "new/deep/four", "new/other/five", "new/other/five"):
        storage.delete(key)
    assert folders(tmp_path) == {"mine", "mine/empty"}
    storage.write("new/deep/six", b"2")
    assert storage.read("new/deep/six") == b"2"
    LocalStorage(tmp_path).delete("new/deep/six")
    assert folders(tmp_path) == {"mine", "mine/empty", "new", "new/deep"}


def test_writes_and_deletions_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def write_and_delete(name: int) -> None:
        for _ in range(20):
            storage.write(f"folder/{name}", b"1")
            storage.delete(f"folder/{name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_delete, range(4)))


def test_without_hard_links_a_file_is_still_created_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as on exFAT

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: storage.create("a/once", b"%d" % number), range(8)))
    assert created.count(True) == 1
    assert storage.read("a/once") == b"%d" % created.index(True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["once"]
