"""How cached entries are read: near ones together, several at once, and from copies on a drive of the node."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import IntegrityError, MissingFileError
from smalti.errors import UserError
from smalti_cache.directory import Place
from smalti_cache.entries import Form
from smalti_cache.pack import PackBuilder
from smalti_cache.reads.local_copies import LocalCopies, open_local_copies
from smalti_cache.reads.ranges import ranges_of
from smalti_cache.store import PackStore

ENTRY = 4096
"""Bytes of an entry: 1,024 numbers."""
PLACES = st.builds(
    lambda file, offset, length: Place(file, offset, length, 0, Form(())),
    st.sampled_from(["a", "b"]),
    st.integers(0, 2000),
    st.integers(1, 300),
)


class Remote:
    """A folder as a remote storage, with the ranges that were read and how many reads there were at once."""

    def __init__(self, root: Path) -> None:
        self._files = LocalStorage(root)
        self.ranges: list[tuple[int, int]] = []
        self.at_once = self._now = 0
        self.damaged = 0
        self._lock = threading.Lock()

    @property
    def location(self):
        return "remote"

    def __getattr__(self, name):
        return getattr(self._files, name)

    def read_range(self, key, start, length):
        with self._lock:
            self._now += 1
            self.at_once = max(self.at_once, self._now)
        time.sleep(0.002)
        data = self._files.read_range(key, start, length)
        with self._lock:
            self._now -= 1
            self.ranges.append((start, length))
            if self.damaged and length > 1:
                self.damaged -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
        return data


def entry(number):
    return {"rows": torch.full((ENTRY // 4,), float(number))}


def remote_store(root, count, **options):
    """A store with the entries (1, 0), (1, 1), ... in one pack."""
    remote = Remote(root)
    pack = PackBuilder()
    for number in range(count):
        pack.add((1, number), entry(number))
    PackStore(remote, "").put(pack)
    store = PackStore(remote, "", **options)
    store.refresh()
    remote.ranges.clear()
    return store, remote


def values(entries):
    return [int(each["rows"][0]) for each in entries]


@settings(max_examples=60, deadline=None)
@given(st.lists(PLACES, max_size=12), st.integers(0, 100), st.integers(100, 800))
def test_ranges_contain_each_entry_once_with_small_gaps_and_bounded_sizes(places, gap, largest):
    ranges = ranges_of(places, gap=gap, largest=largest)
    assert sorted(number for one in ranges for number in one.members) == list(range(len(places)))
    for one in ranges:
        inside = [places[number] for number in one.members]
        assert all(one.start <= place.offset and place.offset + place.length <= one.stop for place in inside)
        assert {place.file for place in inside} == {one.file}
        wanted = {byte for place in inside for byte in range(place.offset, place.offset + place.length)}
        assert one.stop - one.start <= len(wanted) + gap * (len(inside) - 1)
        assert one.stop - one.start <= max(largest, *(place.length for place in inside))


def test_near_entries_of_a_remote_pack_are_read_in_one_request_and_far_ones_at_once(tmp_path):
    store, remote = remote_store(tmp_path, 400)
    near = [(1, number) for number in (7, 5, 6, 9, 5)]
    assert values(store.get_many(near)) == [7, 5, 6, 9, 5]
    assert [length for _, length in remote.ranges] == [5 * ENTRY]

    remote.ranges.clear()
    far = [(1, number) for number in range(0, 400, 50)]
    assert values(store.get_many(far)) == list(range(0, 400, 50))
    assert [length for _, length in remote.ranges] == [ENTRY] * 8
    assert remote.at_once > 1


def test_an_entry_that_was_damaged_on_the_way_is_read_again_by_itself(tmp_path):
    store, remote = remote_store(tmp_path, 3)
    remote.damaged = 1
    assert values(store.get_many([(1, 0), (1, 1), (1, 2)])) == [0, 1, 2]
    assert [length for _, length in remote.ranges] == [3 * ENTRY, ENTRY]
    remote.damaged = 3
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        store.get_many([(1, 0), (1, 1), (1, 2)])


def test_what_was_read_once_is_read_from_the_node_also_by_the_next_process(tmp_path):
    copies = LocalCopies(tmp_path / "node", 10 * ENTRY)
    store, remote = remote_store(tmp_path, 4, copies=copies)
    for _ in range(2):
        assert values(store.get_many([(1, 3), (1, 0)])) == [3, 0]
    assert len(remote.ranges) == 1
    copies.close()

    later = PackStore(remote, "", copies=LocalCopies(tmp_path / "node", 10 * ENTRY))
    later.refresh()
    remote.ranges.clear()
    assert values(later.get_many([(1, 0), (1, 3)])) == [0, 3]
    assert remote.ranges == []


def test_a_damaged_copy_is_replaced(tmp_path):
    copies = LocalCopies(tmp_path / "node", 10 * ENTRY)
    store, remote = remote_store(tmp_path, 2, copies=copies)
    store.get_many([(1, 0), (1, 1)])
    for number, path in enumerate(sorted(files(tmp_path / "node"))):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + b"\7" if number else data[:100])
    remote.ranges.clear()
    for _ in range(2):
        assert values(store.get_many([(1, 0), (1, 1)])) == [0, 1]
    assert remote.ranges == [(remote.ranges[0][0], 2 * ENTRY)]
    assert recorded(tmp_path / "node") == 2 * ENTRY


def files(folder):
    return [path for path in folder.glob("entries/*/*") if path.is_file()]


def recorded(folder):
    return int.from_bytes((folder / "bytes").read_bytes(), "little")


def age(folder, seconds):
    """Let all copies be used that long ago."""
    then = time.time() - seconds
    for path in files(folder):
        with suppress(FileNotFoundError):  # evicted by another process
            os.utime(path, (then, then))


def test_the_limit_is_kept_and_what_this_run_uses_is_not_evicted(tmp_path):
    copies = LocalCopies(tmp_path, 3 * ENTRY)
    for name in "abcd":
        copies.put(name, name.encode() * ENTRY)
    assert [copies.get(name) is not None for name in "abcd"] == [True, True, True, False]
    assert recorded(tmp_path) == sum(path.stat().st_size for path in files(tmp_path)) == 3 * ENTRY
    copies.put("large", b"x" * 4 * ENTRY)
    assert copies.get("large") is None
    assert len(files(tmp_path)) == 3


def test_a_process_that_opens_later_does_not_evict_what_another_one_uses(tmp_path):
    first = LocalCopies(tmp_path, 3 * ENTRY)
    for name in "abc":
        first.put(name, name.encode() * ENTRY)
    time.sleep(0.02)
    second = LocalCopies(tmp_path, 3 * ENTRY)
    for name in "xyz":
        second.put(name, name.encode() * ENTRY)
    assert [name for name in "abcxyz" if second.get(name) is not None] == ["a", "b", "c"]
    first.close()
    second.close()

    time.sleep(0.02)
    later = LocalCopies(tmp_path, 3 * ENTRY)
    later.put("x", b"x" * ENTRY)
    assert later.get("x") is not None


def test_copies_of_processes_that_have_ended_are_evicted_also_if_the_folder_was_never_unused(tmp_path):
    first = LocalCopies(tmp_path, 3 * ENTRY)
    for name in "abc":
        first.put(name, name.encode() * ENTRY)
    time.sleep(0.02)
    second = LocalCopies(tmp_path, 3 * ENTRY)
    assert second.get("b") is not None
    first.close()
    time.sleep(0.02)
    third = LocalCopies(tmp_path, 3 * ENTRY)
    for name in "xyz":
        third.put(name, name.encode() * ENTRY)
    assert [name for name in "abcxyz" if third._path(name).exists()] == ["b", "x", "y"]
    assert len(list((tmp_path / "openings").iterdir())) == 2


def test_copies_of_earlier_runs_are_evicted_the_least_recently_used_first(tmp_path):
    earlier = LocalCopies(tmp_path, 4 * ENTRY)
    for number, name in enumerate("abcd"):
        earlier.put(name, name.encode() * ENTRY)
        os.utime(earlier._path(name), (1000 + number, 1000 + number))
    earlier.close()
    (tmp_path / "entries" / "ab").mkdir(exist_ok=True)
    (tmp_path / "entries" / "ab" / "mine.txt").write_text("of the user")
    (tmp_path / "notes").write_text("of the user")
    os.utime(tmp_path / "entries" / "ab" / "mine.txt", (1, 1))

    copies = LocalCopies(tmp_path, 4 * ENTRY)
    assert copies.get("a") is not None  # so it is in use
    for name in "xy":
        copies.put(name, name.encode() * ENTRY)
    assert [name for name in "abcdxy" if copies._path(name).exists()] == ["a", "d", "x", "y"]
    for name in "zu":
        copies.put(name, name.encode() * ENTRY)
    assert [name for name in "adxyzu" if copies._path(name).exists()] == ["a", "x", "y", "z"]
    copies.close()

    smaller = LocalCopies(tmp_path, ENTRY)
    age(tmp_path, 60)
    smaller.put("v", b"v" * ENTRY)
    assert recorded(tmp_path) == ENTRY
    assert (tmp_path / "entries" / "ab" / "mine.txt").read_text() == (tmp_path / "notes").read_text() == "of the user"


def _copy_forever(folder, process):
    copies = LocalCopies(folder, 20 * ENTRY)
    number = 0
    while True:
        copies.put(f"{process}-{number}" if number % 3 else f"both-{number}", b"x" * ENTRY)
        age(folder, 60)  # so that there is always something to evict
        copies._full = False
        number += 1


def test_after_kills_of_several_processes_the_limit_holds_and_leftovers_are_counted(tmp_path):
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        processes = [context.Process(target=_copy_forever, args=(tmp_path, number)) for number in range(2)]
        for process in processes:
            process.start()
        for _ in range(15):
            time.sleep(0.01)
            for process in processes:
                os.kill(process.pid, signal.SIGSTOP)
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), "a process has failed"
            assert len(files(tmp_path)) <= 20
            for process in processes:
                os.kill(process.pid, signal.SIGCONT)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    (tmp_path / "drafts" / f"{7:016x}.draft").write_bytes(b"left by a kill")
    (tmp_path / "bytes").write_bytes((99 * ENTRY).to_bytes(8, "little"))

    copies = LocalCopies(tmp_path, 20 * ENTRY)
    assert not list((tmp_path / "drafts").iterdir())
    assert recorded(tmp_path) == ENTRY * len(files(tmp_path)) > 0
    LocalCopies(tmp_path, 20 * ENTRY).put("more", b"y" * ENTRY)  # beside the first
    assert copies.get("more") == b"y" * ENTRY


def test_a_folder_that_cannot_be_used_is_reported_once_and_entries_are_read_from_the_storage(tmp_path):
    messages = []
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert open_local_copies(open_to_all, ENTRY, report=messages.append) is None
    assert "other users may write" in messages[0]

    copies = LocalCopies(tmp_path / "node", 100 * ENTRY, report=messages.append)
    store, _ = remote_store(tmp_path, 5, copies=copies)
    (tmp_path / "node" / "drafts").rmdir()
    assert values(store.get_many([(1, 0), (1, 4)])) == [0, 4]
    assert values(store.get_many([(1, 0), (1, 4)])) == [0, 4]
    assert len(messages) == 2
    assert "no more copies of cached entries" in messages[1]


def test_a_pack_that_is_gone_is_named(tmp_path):
    store, _ = remote_store(tmp_path, 300)
    [pack] = tmp_path.glob("*.safetensors")
    pack.unlink()
    with pytest.raises(UserError, match=f"{pack.name} can no longer be read") as raised:
        store.get_many([(1, 0), (1, 299)])
    assert isinstance(raised.value.__cause__, MissingFileError)
