"""Listings from a key on, and in ranges, on a store that lists by folder and on one that lists by key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from smalti_data.all_ranks import listing
from smalti_data.all_ranks.listing import ListedByRanks, list_range
from smalti_data.all_ranks.tasks import Handed

KEYS = sorted(
    {
        *("a-b", "a.txt", "a/x", "a/y/z", "b", "b-1", "b-1/x", "b/1", "b/2", "b/3/4", "é/ü", "z"),
        *(f"img-{number:02}.png" for number in range(6)),
        *(f"img/{number:02}.png" for number in range(3)),
    }
)


@pytest.fixture(scope="module", params=["store", "gateway"])
def filled(request, opened):
    storage = opened(request.getfixturevalue(request.param))
    for key in KEYS:
        if request.param == "store" or key not in ("b", "b-1"):  # the gateway has a file or a folder under a name
            storage.write(key, b"x")
    return storage


def test_a_listing_begins_after_any_key(filled):
    whole = [file.key for file in filled.list()]
    assert len(whole) >= len(KEYS) - 2
    places = [*KEYS, "a", "a/", "a/y", "b/", "b/3", "img", "img-", "img-03", "img/", "img0", "\U0010ffff"]
    for after in places:
        assert [file.key for file in filled.list(after=after)] == [key for key in whole if key > after], after


@pytest.mark.parametrize("server", ["store", "gateway"])
def test_a_listing_from_a_key_on_does_not_receive_what_is_before_it(request, opened, server):
    storage = opened(request.getfixturevalue(server))
    for number in range(60):
        storage.write(f"{number:04}.png", b"x")
    received = []
    for after in ("", "0057.png"):
        before = storage.traffic()["list"].received if received else 0
        found = [file.key for file in storage.list(after=after)]
        received.append(storage.traffic()["list"].received - before)
    assert found == ["0058.png", "0059.png"]
    assert received[1] < received[0] / 5
    assert storage.lists_ranges


def test_ranks_list_what_one_lists(filled, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(listing, "FIRST_ROWS", 4)
    monkeypatch.setattr(listing, "CHUNK_ROWS", 6)
    handed, ended, done = Handed(2), threading.Event(), []

    def work():
        while not ended.wait(0.001):
            while (task := handed.next()) is not None:
                list_range(filled, task)
                done.append(task)
                handed.done(task.rows)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(handed.ranks)]
    for thread in threads:
        thread.start()
    source = ListedByRanks(filled, "pets", handed, tmp_path / ".pets.listing")
    found = [row for batch in source.list_columns() for row in batch.to_pylist()]
    ended.set()
    assert [row["key"] for row in found] == [file.key for file in filled.list()]
    assert len(done) > 3
