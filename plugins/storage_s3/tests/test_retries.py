"""Requests that fail for a while are repeated: the result is exact, and nothing is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smalti.data import IntegrityError, MissingFileError, StorageError, TransientStorageError
from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.listing import pages
from smalti_storage_s3.client.transport import Page
from smalti_testing import FaultProxy, Rule

FAULTS = (
    *("500", "503", "429", "redirect", "error_body", "reset_before", "reset_after", "lost_reply"),
    *("cut", "cut_reset", "short_length", "long_length", "stall", "flip_get", "flip_put"),
)
"""Faults that pass: after two of them the operation succeeds."""
SMALL = os.urandom(200_000)
LARGE = os.urandom((5 << 20) + 5)
SHORT = Timeouts(deadline=15, first_deadline=15, pause=0.002, longest_pause=0.02, read_timeout=0.5)
IN_PARTS = {"create": ("503", "lost_reply"), "part": ("503", "cut", "flip_put"), "complete": ("lost_reply", "error_body")}


@pytest.fixture(scope="module", params=[False, True], ids=["boto3", "obstore"])
def behind(request, store, opened):
    """Opens a storage behind a proxy; the proxy; and the same place without the proxy."""
    place = {"aws_data_prefix": f"faults-{request.param}/"}
    with FaultProxy(store.endpoint, seed=7) as proxy:
        direct = opened(store, **place)

        def faulty(**changes):
            return opened(store, fast=request.param, aws_endpoint_url=proxy.endpoint, **place, **changes)

        for number in range(3):
            direct.write(f"listed/{number}", SMALL[:10])
        direct.write("read", SMALL)
        yield faulty, proxy, direct


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(LARGE)
    return path


class OtherBytesError(Exception):
    """What must never happen."""


def same(found: bytes, wanted: bytes) -> None:
    if found != wanted:
        raise OtherBytesError


def operate(operation: str, storage, direct, large: Path) -> None:
    """Does one thing, and compares its result with what is there."""
    if operation == "put":
        storage.write("written", SMALL)
        same(direct.read("written"), SMALL)
    elif operation == "get":
        same(storage.read("read"), SMALL)
    elif operation == "range":
        same(storage.read_range("read", 1000, 50_000), SMALL[1000:51_000])
    elif operation == "head":
        assert storage.stat("read").size == len(SMALL)
    elif operation == "list":
        assert [file.key for file in storage.list("listed/")] == ["listed/0", "listed/1", "listed/2"]
    elif operation == "delete":
        direct.write("deleted", b"x")
        storage.delete("deleted")
        with pytest.raises(MissingFileError):
            direct.read("deleted")
    else:
        storage.upload(large, "large")
        same(direct.read("large"), LARGE)


def missed(proxy, operation: str, faults, call) -> list[tuple[str, str]]:
    """The faults that did not pass without a trace."""
    found = []
    for fault in faults:
        proxy.clear()
        proxy.add(Rule(fault=fault, operations={operation}, count=2, retry_after=0, seconds=1))
        before = len(proxy.injected)
        try:
            call()
        except (StorageError, OtherBytesError) as error:
            found.append((fault, repr(error)))
        if len(proxy.injected) == before:
            found.append((fault, "not injected"))
    proxy.clear()
    return found


@pytest.mark.parametrize("operation", ["put", "get", "list"])
def test_faults_that_pass_change_nothing(behind, large, operation):
    faulty, proxy, direct = behind
    storage = faulty(timeouts=SHORT)
    without_digest = {"flip_get"} if operation == "range" else set()  # the caller has the digest of what it reads in parts
    no_body = {"head": {"cut", "cut_reset", "stall", "short_length"}, "delete": {"cut", "cut_reset", "stall"}}
    faults = [each for each in FAULTS if each not in without_digest | no_body.get(operation, set())]
    assert missed(proxy, operation, faults, lambda: operate(operation, storage, direct, large)) == []


@pytest.mark.parametrize("fault", ["cut", "cut_reset", "stall"])
def test_the_body_of_an_error_may_be_cut_off_as_well(behind, fault):
    faulty, proxy, _ = behind
    proxy.clear()
    proxy.add(Rule(fault=fault, operations={"get"}, count=2, seconds=1))
    before = len(proxy.injected)
    with pytest.raises(MissingFileError):
        faulty(timeouts=SHORT).read("absent")
    assert len(proxy.injected) > before
    proxy.clear()


@pytest.mark.parametrize("operation", IN_PARTS)
def test_faults_that_pass_change_nothing_in_an_upload_in_parts(store, opened, large, operation):
    direct = opened(store, aws_data_prefix=f"parts-{operation}/")
    with FaultProxy(store.endpoint, seed=7) as proxy:
        storage = opened(store, aws_endpoint_url=proxy.endpoint, aws_data_prefix=f"parts-{operation}/")
        assert missed(proxy, operation, IN_PARTS[operation], lambda: operate("upload", storage, direct, large)) == []


def test_a_file_that_never_arrives_is_an_error_and_leaves_no_parts(store, opened, large):
    with FaultProxy(store.endpoint, [Rule(fault="503", operations={"complete"}, retry_after=0)], seed=7) as proxy:
        timeouts = Timeouts(deadline=0.5, pause=0.05, longest_pause=0.1)
        storage = opened(store, aws_endpoint_url=proxy.endpoint, timeouts=timeouts)
        with pytest.raises(TransientStorageError, match="write failed"):
            storage.upload(large, "large")
        assert storage.abandoned_uploads(older_than=0) == []
        with pytest.raises(MissingFileError):
            storage.read("large")


def test_abandoned_uploads_are_found_and_aborted(store, opened, large):
    storage = opened(store)
    with FaultProxy(store.endpoint, [Rule(fault="lost_reply", operations={"create"}, count=1)], seed=7) as proxy:
        behind = opened(store, aws_endpoint_url=proxy.endpoint, aws_data_prefix=storage.prefix)
        behind.upload(large, "large")
    [(key, upload)] = storage.abandoned_uploads(older_than=0)
    assert (key, storage.abandoned_uploads()) == (f"{storage.prefix}large", [])  # not older than a day
    storage.abort_uploads([(key, upload)])
    assert storage.abandoned_uploads(older_than=0) == []
    same(storage.read("large"), LARGE)


def test_bytes_that_stay_damaged_are_an_error(behind):
    faulty, proxy, _ = behind
    proxy.clear()
    proxy.add(Rule(fault="flip_get", operations={"get"}))
    with pytest.raises(IntegrityError, match="differ from their digest"):
        faulty().read("read")
    proxy.clear()


def test_a_store_that_answers_only_with_errors_is_reported_long_before_the_deadline(behind, caplog):
    faulty, proxy, _ = behind
    proxy.clear()
    proxy.add(Rule(fault="503", operations={"get"}, retry_after=0))
    storage = faulty(timeouts=Timeouts(deadline=1.5, first_deadline=1.5, pause=0.05, longest_pause=0.1, silent=0.5))
    with pytest.raises(TransientStorageError, match="read failed"):
        storage.read("read")
    proxy.clear()
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("smalti_storage_s3")]
    assert "read failed" in line
    assert line.endswith("it is tried again for up to 2 s")


def test_a_read_that_was_cut_off_goes_on_where_it_was(behind):
    faulty, proxy, direct = behind
    direct.write("long", LARGE[: 4 << 20])
    proxy.clear()
    proxy.add(Rule(fault="cut", operations={"get", "range"}, count=3))
    storage = faulty()
    same(storage.read("long"), LARGE[: 4 << 20])
    seen = [each for each in proxy.exchanges if each.path.endswith("/long")]
    proxy.clear()
    assert [each.operation for each in seen] == ["get", "range", "range", "range"]
    assert sum(each.sent for each in seen) < 7 << 20  # 10 MiB if it began again
    assert storage.traffic()["read"].retries == 3


def test_a_page_of_a_listing_in_a_wrong_order_is_asked_for_again():
    damaged, whole = (Page(keys=keys, sizes=[1, 1], etags=["", ""], more=False) for keys in (["b/1", "a/2"], ["b/1", "b/2"]))
    answers = [damaged, whole]
    assert [page.keys for page in pages(lambda *_: answers.pop(0), "b/", "", "s3://bucket")] == [["b/1", "b/2"]]
    with pytest.raises(StorageError, match="the store lists 'a/2' after 'b/1'"):
        list(pages(lambda *_: damaged, "b/", "", "s3://bucket"))
