"""Stores of many packs are opened with few requests: many at once, indexes beside the packs, one rank of each node."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smalti_cache.directory
import smalti_cache.index_files
import smalti_cache.rounds
from smalti.data.storage.local import LocalStorage
from smalti.data.storage.protocol import AccessDeniedError, TransientStorageError
from smalti.parallel.gloo import GlooCommunicator
from smalti.rundir import Phases
from smalti.types import World
from smalti_cache.contents import cached_encodings_in
from smalti_cache.encoder import Encoder
from smalti_cache.keys import Keys
from smalti_cache.pack import PackBuilder
from smalti_cache.places import CacheFolders, CachePlace
from smalti_cache.store import PackStore
from support.forked_ranks import forked_processes

PACKS = 200


class Slow(LocalStorage):
    """A folder behind a delay for each request, which counts the requests for contents, and how many there are at once."""

    def __init__(self, root: Path, seconds: float = 0.02) -> None:
        super().__init__(root)
        self.seconds = seconds
        self.requests = self.most = self._now = 0
        self._lock = threading.Lock()

    def _request(self):
        with self._lock:
            self.requests, self._now = self.requests + 1, self._now + 1
            self.most = max(self.most, self._now)
        time.sleep(self.seconds)
        with self._lock:
            self._now -= 1

    def read(self, key):
        self._request()
        return super().read(key)

    def read_range(self, key, start, length):
        self._request()
        return super().read_range(key, start, length)


class ReadOnly(Slow):
    def write(self, key, data):
        raise AccessDeniedError(f"{key}: permission denied (403)")


def fill(root: Path, numbers) -> Keys:
    """Write a pack with two entries for each number; returns their keys."""
    for number in numbers:
        pack = PackBuilder()
        for low in range(2):
            pack.add((number, low), {"rows": torch.tensor([number, low])})
        PackStore(LocalStorage(root), "").put(pack)
    return Keys.of([(number, low) for number in numbers for low in range(2)])


def test_headers_are_read_many_at_once(tmp_path):
    keys = fill(tmp_path, range(PACKS))
    storage = Slow(tmp_path)
    store = PackStore(storage, "")
    store.refresh()
    assert store.has(keys).all()
    assert storage.requests == PACKS
    assert storage.most >= 32


def test_an_index_of_many_packs_is_written_once_and_found_by_every_node(tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.index_files, "LEAST", 50)
    monkeypatch.setattr(smalti_cache.index_files, "_ENTRIES", 300)
    keys = fill(tmp_path, range(PACKS))
    main = PackStore(LocalStorage(tmp_path), "")
    files = main.add_indexes(main.files())
    assert files == main.files() == main.add_indexes(files)
    assert len(list(tmp_path.glob("*.index"))) == 2  # of 150 packs, and of 50
    later = fill(tmp_path, range(PACKS, PACKS + 3))

    storage = Slow(tmp_path)
    store = PackStore(storage, "")
    store.refresh()
    assert storage.requests == 2 + 2 + 3  # which packs there are in each index, their entries, and three packs without one
    assert store.has(Keys.joined([keys, later])).all()
    assert [store.get((number, 1))["rows"].tolist() for number in (0, 150, 199, 202)] == [
        [number, 1] for number in (0, 150, 199, 202)
    ]
    store.refresh()
    assert len(store) == len(keys) + len(later)
    assert PackStore(ReadOnly(tmp_path), "").add_indexes(files) == files


def test_an_index_is_not_used_when_it_is_damaged_or_names_a_pack_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.index_files, "LEAST", 50)
    keys = fill(tmp_path, range(60))
    main, told = PackStore(LocalStorage(tmp_path), ""), []
    main.add_indexes(main.files())
    [index] = tmp_path.glob("*.index")
    data = index.read_bytes()
    for damaged in (data[:-1], data[:40], b""):
        index.write_bytes(damaged)
        store = PackStore(LocalStorage(tmp_path), "", report=told.append)
        store.refresh()
        assert store.has(keys).all()
    assert [f"{index} cannot be read" in message for message in told] == [True] * 3

    index.write_bytes(data)
    [first, *_] = tmp_path.glob("*.safetensors")
    first.unlink()
    store = PackStore(LocalStorage(tmp_path), "", report=told.append)
    store.refresh()
    assert store.has(keys).sum() == 2 * 59
    store.add_indexes(store.files())
    assert len(list(tmp_path.glob("*.index"))) == 2


def test_a_store_that_does_not_answer_is_not_taken_for_a_damaged_index(tmp_path, monkeypatch):
    class Busy(Slow):
        def read_range(self, key, start, length):
            if key.endswith(".index"):
                raise TransientStorageError("no answer")
            return super().read_range(key, start, length)

    monkeypatch.setattr(smalti_cache.index_files, "LEAST", 2)
    fill(tmp_path, range(3))
    main = PackStore(LocalStorage(tmp_path), "")
    main.add_indexes(main.files())
    with pytest.raises(TransientStorageError):
        PackStore(Busy(tmp_path), "").refresh()


def test_indexes_are_removed_with_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(smalti_cache.index_files, "LEAST", 2)
    communicator = GlooCommunicator(world=World(), group=None)
    place, family = CachePlace(folder=tmp_path), Family()
    folders = CacheFolders(texts=place, latents={}, index_folder=tmp_path / "node")
    work = Encoder(family=family, communicator=communicator, folders=folders, batch=1, phases=Phases())
    [store] = work.open("texts", [place])
    [folder] = tmp_path.glob("texts-*")
    fill(folder, range(3))
    work._refresh([store])
    [index] = folder.glob("*.index")
    [cache] = cached_encodings_in(tmp_path)
    contents, size = cache.contents(), index.stat().st_size
    assert (contents.entries, contents.packs, contents.unreadable) == (6, 3, ())
    assert contents.bytes > size
    cache.remove()
    assert not folder.exists()


class Family:
    name = "tiny"

    def encoder_identity(self, kind):
        return {}


class Timed(GlooCommunicator):
    """Notes the longest call."""

    longest = 0.0

    def all_gather_text(self, value):
        begun = time.monotonic()
        answers = super().all_gather_text(value)
        self.longest = max(self.longest, time.monotonic() - begun)
        return answers


def open_on_a_node(root: Path, node: Path, least: int) -> tuple[int, float, int]:
    """Requests of this rank, the longest collective call in seconds, and how many entries this rank has found."""
    smalti_cache.directory.IN_MEMORY = 10
    smalti_cache.rounds._SECONDS = 0.2
    smalti_cache.index_files.LEAST = least
    rank = dist.get_rank()
    communicator = Timed(world=World(rank=rank, size=2, local_rank=rank, local_size=2), group=dist.group.WORLD)
    place = CachePlace(folder=root)
    folders = CacheFolders(texts=place, latents={})
    work = Encoder(family=Family(), communicator=communicator, folders=folders, batch=1, phases=Phases())
    storage = Slow(root, 1.0)
    store = PackStore(storage, "", folder=node)
    work._refresh([store])
    return storage.requests, communicator.longest, len(store)


@pytest.mark.parametrize(("least", "more"), [(1000, 0), (100, 2)])
def test_one_rank_of_a_node_reads_and_the_others_do_not_wait_for_it_in_one_call(tmp_path, least, more):
    """Also if it writes an index first, and reads which packs it has, and their entries."""
    (tmp_path / "cache").mkdir()
    fill(tmp_path / "cache", range(3 * 64))
    with forked_processes() as ranks:
        (requests, _, count), (others, longest, found) = ranks.run(open_on_a_node, tmp_path / "cache", tmp_path / "node", least)
    assert (requests, others) == (3 * 64 + more, 0)
    assert count == found == 6 * 64
    assert longest < 2  # three headers after each other take 3 s
