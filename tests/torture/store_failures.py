"""B3 to B6: servers that are killed or paused, wrong keys and clocks, writers that race, uploads that nobody completes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from smalti.data import AccessDeniedError, StorageError
from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.settings import S3Settings
from smalti_storage_s3.client.storage import S3Storage
from smalti_testing import FaultProxy, ObjectStore, Rule, juicefs, seaweed
from smalti_testing.fault_proxy import Fault

from .object_store import PART, TIMEOUTS, storage_of
from .subject import Report

BRIEF = Timeouts(deadline=1.5, first_deadline=1.5, pause=0.02, longest_pause=0.2, connect_timeout=0.3, read_timeout=0.5)


def stopping_server(chance: Random, place: Path, *, rounds: int = 4) -> Report:
    """B3: SIGKILL and a restart, or SIGSTOP, while threads write: what was acknowledged is there, and all writers go on."""
    report = Report()
    with seaweed(place / "store") as store:
        for number in range(rounds):
            _interrupted(chance, store, f"{number}/", report, kill=number % 2 == 0)
            report.faults += 1
    return report


def _interrupted(chance: Random, store: ObjectStore, prefix: str, report: Report, *, kill: bool) -> None:
    """One interruption of writers of small objects and of one upload in parts."""
    storages = [storage_of(store, store.endpoint, fast=fast, prefix=prefix, timeouts=TIMEOUTS) for fast in (False, True)]
    acknowledged: dict[str, bytes] = {}
    stop, errors = threading.Event(), []
    seeds = [chance.randrange(10**9) for _ in range(4)]

    def write(thread: int) -> None:
        own, number = Random(seeds[thread]), 0
        while not stop.is_set() and number < 200:
            large = thread == 0
            data = own.randbytes(PART + 1000 if large else own.randint(0, 60_000))
            key, number = f"{thread}-{number}", number + 1
            try:
                storages[thread % 2].write(key, data)
            except StorageError as error:
                errors.append(f"{key}: {error.message}")
                return
            acknowledged[key] = data

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, thread) for thread in range(4)]
        time.sleep(chance.uniform(0.1, 0.5))
        if kill:
            store.kill()
            time.sleep(chance.uniform(0, 0.3))
            store.start()
        else:
            store.pause()
            time.sleep(chance.uniform(2.1, 3))  # longer than a request may take
            store.resume()
        time.sleep(0.3)
        stop.set()
        for writer in writers:
            writer.result()
    if kill:
        store.restart()
    name = "a kill" if kill else "a pause"
    report.expect(not errors, f"after {name} writers give up: {errors[:2]}")
    report.expect(bool(acknowledged), f"nothing was written around {name}")
    for key, data in acknowledged.items():
        reply = store.request("GET", prefix + key)
        report.expect(reply.status == 200 and reply.body == data, f"after {name}: {key} is lost or changed ({reply.status})")


def refused_requests(chance: Random, place: Path) -> Report:
    """B4: wrong keys, a wrong clock, no permission: one request, an error with the cause, no secret in it."""
    report = Report()
    with seaweed(place / "store") as store:
        store.request("PUT", "file", b"content")
        for wrong in ("secret", "key", "bucket"):
            for fast in (False, True):
                settings = S3Settings(
                    bucket_name="another-bucket" if wrong == "bucket" else store.bucket,
                    endpoint_url=store.endpoint,
                    region_name=store.region,
                    access_key_id="unknown" if wrong == "key" else store.access_key,
                    secret_access_key="wrong-secret-8d1f" if wrong == "secret" else store.secret_key,
                )
                _one_request(report, settings, store, fast, wrong)
        for code, fault in (("clock", "RequestTimeTooSkewed"), ("token", "ExpiredToken"), ("policy", "AccessDenied")):
            for fast in (False, True):
                _refused_by_proxy(report, store, code, fault, fast)
    return report


def _one_request(report: Report, settings: S3Settings, store: ObjectStore, fast: bool, wrong: str) -> None:
    with FaultProxy(store.endpoint) as proxy:
        storage = S3Storage(settings.model_copy(update={"endpoint_url": proxy.endpoint}), fast=fast, timeouts=TIMEOUTS)
        calls: list[Callable[[], object]] = [
            lambda: storage.read("file"),
            lambda: storage.write("file", b"x"),
            lambda: list(storage.list()),
        ]
        for call in calls:
            before = len(proxy.exchanges)
            report.faults += 1
            _expect_refusal(report, call, f"wrong {wrong}", settings.secret_access_key or "", bucket=wrong == "bucket")
            tries = len(proxy.exchanges) - before
            report.expect(tries <= 1, f"wrong {wrong}: {tries} requests instead of 1")
    report.expect(store.request("GET", "file").body == b"content", f"wrong {wrong}: the file was written")


def _refused_by_proxy(report: Report, store: ObjectStore, name: str, code: str, fast: bool) -> None:
    with FaultProxy(store.endpoint, [Rule(fault="403", code=code)]) as proxy:
        storage = storage_of(store, proxy.endpoint, fast=fast)
        for call in (lambda: storage.read("file"), lambda: storage.write("file", b"x"), lambda: list(storage.list())):
            before = len(proxy.exchanges)
            report.faults += 1
            _expect_refusal(report, call, name, store.secret_key)
            tries = len(proxy.exchanges) - before
            report.expect(tries == 1, f"{name}: {tries} requests instead of 1")


def _expect_refusal(report: Report, call: Callable[[], object], name: str, secret: str, *, bucket: bool = False) -> None:
    try:
        call()
    except StorageError as error:
        text = f"{error.message} {error.fix}"
        report.expect(bucket or isinstance(error, AccessDeniedError), f"{name}: {type(error).__name__}: {text}")
        report.expect(secret not in text, f"{name}: the secret is in the message")
        report.expect(bool(error.fix), f"{name}: no fix in {text}")
    else:
        report.broken.append(f"{name}: no error")


def racing_writers(chance: Random, place: Path, *, races: int = 40) -> Report:
    """B5: several writers create the same file: exactly one wins, and its bytes stay, also if replies are lost.

    On a store without conditional writes the storage says so.
    """
    report = Report()
    with seaweed(place / "seaweed") as store:
        rules = [Rule(fault="lost_reply", operations={"put"}, path="race/", chance=0.2)]
        with FaultProxy(store.endpoint, rules, seed=chance.randrange(10**6)) as proxy:
            writers = [storage_of(store, proxy.endpoint, fast=fast) for fast in (False, True, False)]
            report.expect(
                all(writer.creates_once for writer in writers), "SeaweedFS refuses, and the probe says that it does not"
            )
            with ThreadPoolExecutor(len(writers)) as pool:
                for number in range(races):
                    key = f"race/{number}"
                    contents = [f"writer {writer} of {number}".encode() for writer in range(len(writers))]
                    won = list(pool.map(lambda writer, data, key=key: writer.create(key, data), writers, contents))
                    found = store.request("GET", key).body
                    report.faults += 1
                    report.expect(sum(won) == 1, f"{sum(won)} writers of {key} have won")
                    if sum(won) == 1:
                        report.expect(found == contents[won.index(True)], f"{key} is not what its winner wrote")
    with juicefs(place / "juicefs") as other:
        for fast in (False, True):
            storage = storage_of(other, other.endpoint, fast=fast)
            report.expect(not storage.creates_once, "JuiceFS overwrites, and the probe says that it does not")
            report.expect(storage.create("once", b"1") == (not fast), "a file that is there was created")
            report.faults += 1
        report.expect([key for key in other.keys() if key != "once"] == [], f"the probe has left {other.keys()}")  # noqa: SIM118
    return report


def many_keys(chance: Random, place: Path, *, count: int = 1100) -> Report:
    """B6: listings of several pages, unusual keys, and uploads in parts that were abandoned, under faults."""
    report = Report()
    names = ["with blank", "ä/日本", "a+b&c", "%2F", "a-b", "a/x", "a0", "quote'\"", "semi;colon", "star*", "deep/" * 20 + "x"]
    keys = sorted({*names, *(f"{number % 20 // 19}/{chance.randrange(10**9):09}" for number in range(count))})
    with seaweed(place / "store") as store:
        direct = storage_of(store, store.endpoint, fast=True, prefix="many/")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: direct.write(key, key.encode()), keys))
        kinds: tuple[Fault, ...] = ("503", "cut", "reset_before", "short_length")
        rules = [Rule(fault=fault, operations={"list"}, chance=0.15, retry_after=0) for fault in kinds]
        with FaultProxy(store.endpoint, rules, seed=chance.randrange(10**6)) as proxy:
            storage = storage_of(store, proxy.endpoint, fast=True, prefix="many/")
            report.expect([file.key for file in storage.list()] == keys, "the listing is not every key, sorted")
            after = chance.choice(keys)
            report.expect(
                [file.key for file in storage.list(after=after)] == [key for key in keys if key > after], "list(after)"
            )
            report.expect(all(storage.read(key) == key.encode() for key in names), "an unusual key has other bytes")
            report.faults += len(proxy.injected)
        _abandoned(chance, store, report)
    return report


def _abandoned(chance: Random, store: ObjectStore, report: Report) -> None:
    """An upload whose process ends before it is complete."""
    with FaultProxy(store.endpoint, [Rule(fault="reset_before", operations={"complete", "abort"})]) as proxy:
        storage = storage_of(store, proxy.endpoint, fast=False, prefix="many/", timeouts=BRIEF)
        try:
            storage.write("never", chance.randbytes(PART + 10))
            report.broken.append("an upload without completion was acknowledged")
        except StorageError:
            report.faults += 1
    direct = storage_of(store, store.endpoint, fast=False, prefix="many/")
    left = direct.abandoned_uploads(older_than=-60)
    report.expect([key for key, _ in left] == ["many/never"], f"abandoned uploads: {left}")
    direct.abort_uploads(left)
    report.expect(not direct.abandoned_uploads(older_than=-60), "an abandoned upload is still there")
    report.expect(store.request("GET", "many/never").status == 404, "an upload without completion is there")
