"""Listings by several ranks: the same files in the same order as by one, whatever the keys and the ranges are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings, strategies as st

from smalti.data import StoredFile, TransientStorageError
from smalti.data.storage.protocol import Storage
from smalti_data.all_ranks import listing
from smalti_data.all_ranks.bounds import split_keys
from smalti_data.all_ranks.listing import ListedByRanks, list_range
from smalti_data.all_ranks.tasks import Handed, Task
from smalti_testing import MemoryStorage


class Keys(MemoryStorage):
    """Files that are nothing but keys; counts requests."""

    def __init__(self, keys: set[str]) -> None:
        super().__init__()
        self.keys, self.requests, self.away = sorted(keys), 0, ""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        self.requests += 1
        for key in self.keys:
            if key == self.away:
                raise TransientStorageError("the server is away")
            if key.startswith(prefix) and key > after:
                yield StoredFile(key=key, size=len(key), etag=f"etag of {key}")


@contextmanager
def ranks(storage: Storage, handed: Handed, done: list[Task]) -> Iterator[None]:
    """Threads that do the tasks, as ranks would; an error of theirs is raised here."""
    ended, errors = threading.Event(), []

    def work() -> None:
        while not ended.wait(0.0005):
            while (task := handed.next()) is not None:
                try:
                    list_range(storage, task)
                except TransientStorageError as error:
                    errors.append(error)
                    return
                done.append(task)
                handed.done(task.rows)

    threads = [threading.Thread(target=work) for _ in range(handed.ranks)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def listed_by(storage: Storage, folder: Path, *, count: int = 3, known: tuple[str, ...] = ()) -> tuple[list[dict], list[Task]]:
    """What ranks list, and the tasks that they did."""
    handed, done = Handed(count), []
    with ranks(storage, handed, done):
        source = ListedByRanks(storage, "pets", handed, folder / ".pets.arrow.listing", known)
        rows = [row for batch in source.list_columns() for row in batch.to_pylist()]
    assert list(folder.iterdir()) == []
    return rows, done


def listed_alone(storage: Storage) -> list[dict]:
    return [row for batch in storage.list_columns() for row in batch.to_pylist()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a few files."""
    monkeypatch.setattr(listing, "FIRST_ROWS", 3)
    monkeypatch.setattr(listing, "CHUNK_ROWS", 5)


TEXTS = st.text(alphabet="ab0-./é\U0010ffff\ue000", min_size=1, max_size=6)
KEYS = st.sets(TEXTS.map(lambda text: "/".join(filter(None, text.replace(".", "").split("/")))).filter(bool), max_size=60)


@settings(max_examples=30, deadline=None)
@given(keys=KEYS, known=st.lists(TEXTS, max_size=3, unique=True))
@example(keys={f"{number:04}" for number in range(50)}, known=[])
@example(keys={"a" * length for length in range(1, 30)}, known=[])
@example(keys={"a\U0010ffffa", "a\U0010ffff0", "00", "a", "b", "000", "0"}, known=["/"])
def test_every_file_is_listed_once_in_order(keys: set[str], known: list[str]) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "FIRST_ROWS", 3)
        patch.setattr(listing, "CHUNK_ROWS", 5)
        storage = Keys(keys)
        assert listed_by(storage, Path(folder), known=tuple(sorted(known)))[0] == listed_alone(storage)


def test_a_flat_prefix_is_listed_in_several_ranges_at_once(small: None, tmp_path: Path) -> None:
    storage = Keys({f"photos/IMG_{number:05}.jpg" for number in range(0, 90_000, 1000)})
    rows, done = listed_by(storage, tmp_path)
    assert rows == listed_alone(storage)
    first, *others = sorted(done, key=lambda task: task.after)
    assert (first.after, first.until) == ("", None)
    assert len({task.until for task in others}) >= 9  # by the first digit


def test_a_small_dataset_is_listed_by_one_rank_with_one_request(tmp_path: Path) -> None:
    storage = Keys({f"{number:05}.jpg" for number in range(1000)})
    rows, done = listed_by(storage, tmp_path)
    assert (len(rows), len(done), storage.requests) == (1000, 1, 1)


def test_ranges_that_turn_out_large_are_split_again(small: None, tmp_path: Path) -> None:
    """All but one key are in one of the first ranges."""
    storage = Keys({"a", "b", "c", "d", *(f"x/{number:03}" for number in range(200)), "z"})
    rows, done = listed_by(storage, tmp_path)
    assert rows == listed_alone(storage)
    assert len({task.until for task in done if task.after.startswith("x/")}) > 5


def test_keys_of_the_last_index_split_the_listing(small: None, tmp_path: Path) -> None:
    storage = Keys({f"{number:03}" for number in range(90)})
    rows, done = listed_by(storage, tmp_path, known=("030", "060"))
    assert rows == listed_alone(storage)
    assert {("", "030"), ("030", "060"), ("060", None)} <= {(task.after, task.until) for task in done}


@pytest.mark.parametrize(
    ("keys", "pieces", "expected"),
    [
        (["same"], 8, 1),
        ([], 8, 1),
        ([f"{number:08}.png" for number in range(1000)], 8, 10),
        ([f"{number:08}.png" for number in range(1000)], 20, 100),
        ([f"{number:x}" for number in range(256, 4096)], 8, 15),
        (["a", "ab", "abc", "abcd"], 8, 1),
        (["a", "a/0", "a/1", "a/2"], 8, 3),
    ],
)
def test_bounds_are_where_keys_begin_to_differ(keys: list[str], pieces: int, expected: int) -> None:
    bounds = split_keys(lambda after: next((key for key in keys if key > after), None), "", None, pieces)
    ranges = list(zip(["", *bounds], [*bounds, "\U0010ffff"], strict=True))
    held = [sum(after < key <= until for key in keys) for after, until in ranges]
    assert (len(held), sum(held)) == (expected, len(keys))
    assert all(held) or not keys
