"""B1: every fault at every operation of the S3 client: exact bytes or an error for the user, no wrong bytes, no hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from smalti.data import StorageError
from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.settings import S3Settings
from smalti_storage_s3.client.storage import S3Storage
from smalti_testing import FaultProxy, ObjectStore, Rule, seaweed
from smalti_testing.fault_proxy import FAULTS, Fault, Operation

from .subject import Report

PART = 5 << 20
"""The smallest part that the store takes, so that an upload in parts is cheap."""
TIMEOUTS = Timeouts(deadline=150, first_deadline=150, pause=0.01, longest_pause=0.1, connect_timeout=5, read_timeout=4)
"""Longer than a store on a busy disk takes to answer: its first 5 MiB parts, eight at once, can take a minute."""
HANGS_AFTER = 400
"""Seconds. Far more than the deadline: only something that never ends takes as long."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault at one operation, `count` times in a row."""

    fault: Fault
    operation: Operation
    fast: bool
    count: int = 1

    @property
    def name(self) -> str:
        return f"{self.fault} x {self.count}, {self.operation}, {'obstore' if self.fast else 'boto3'}"


def all_cases(count: int = 1) -> list[Case]:
    """Every fault that can happen to an operation, with both libraries where both are used."""
    found = []
    for operation in ("put", "create", "part", "complete", "get", "range", "head", "list", "delete"):
        for fault in FAULTS:
            # Nothing in S3 tells that a range or a listing was changed on its way: who has a digest compares it.
            if (fault == "flip_get" and operation != "get") or (fault == "flip_put" and operation not in ("put", "part")):
                continue
            for fast in (False, True):
                if not fast or operation not in ("create", "part", "complete", "list"):
                    found.append(Case(fault=fault, operation=operation, fast=fast, count=count))
    return found


def storage_of(store: ObjectStore, endpoint: str, *, fast: bool, timeouts: Timeouts = TIMEOUTS, prefix: str = "") -> S3Storage:
    settings = S3Settings(
        bucket_name=store.bucket,
        data_prefix=prefix,
        endpoint_url=endpoint,
        region_name=store.region,
        access_key_id=store.access_key,
        secret_access_key=store.secret_key,
    )
    return S3Storage(settings, fast=fast, timeouts=timeouts, part=PART)


class Setting:
    """The store, the proxy, and storages that all cases share; making a client of boto3 takes a while."""

    def __init__(self, store: ObjectStore, proxy: FaultProxy) -> None:
        self.store, self.proxy = store, proxy
        self.direct = storage_of(store, store.endpoint, fast=False)
        self.proxied = {fast: storage_of(store, proxy.endpoint, fast=fast) for fast in (False, True)}


class Played:
    """One case, under a prefix of its own."""

    def __init__(self, case: Case, number: int, setting: Setting) -> None:
        self.case, self.store, self.proxy, self.prefix = case, setting.store, setting.proxy, f"b1/{number:04}/"
        self.file = self.prefix + "file"
        self.data = Random(f"{number} {case.name}").randbytes(30_000 + 37 * number)
        self.direct, self.storage = setting.direct, setting.proxied[case.fast]
        self.error: StorageError | None = None
        self.rule = Rule(fault=case.fault, operations={case.operation}, path=self.prefix, count=case.count, retry_after=0)

    def content(self) -> bytes | None:
        """What a plain client finds in the store."""
        reply = self.store.request("GET", self.file)
        return reply.body if reply.status == 200 else None

    def run(self) -> str:
        """What went wrong; empty if nothing did."""
        play: Callable[[], str] = getattr(self, self.case.operation)
        wrong = play()
        # A 200 to a range is also what stores answer that know no ranges.
        final = self.case.fault in ("403", "404") or (self.case.fault, self.case.operation) == ("error_body", "range")
        if self.error is not None and not final:
            wrong = wrong or f"gives up: {self.error}"
        return wrong or ("" if self.proxy.hits(self.rule) else "the fault did not happen")

    def attempt(self, call: Callable[[], object]) -> tuple[bool, object]:
        """Whether a call with the fault succeeds, and what it returns. Anything but a StorageError is raised."""
        self.proxy.add(self.rule)
        try:
            return True, call()
        except StorageError as error:
            if not error.message or self.store.secret_key in f"{error.message} {error.fix}":
                raise AssertionError(f"a bad message: {error}") from error
            self.error = error
            return False, None

    def put(self, *, old: bytes = b"the old content") -> str:
        self.direct.write(self.file, old)
        written, _ = self.attempt(lambda: self.storage.write(self.file, self.data))
        found = self.content()
        if written:
            return "" if found == self.data else "written, and other bytes are there"
        return "" if found in (old, self.data) else "refused, and neither the old nor the new bytes are there"

    def part(self) -> str:
        self.data = self.data + bytes(PART)
        return self.put()

    complete = part
    create = part

    def get(self) -> str:
        self.direct.write(self.file, self.data)
        read, found = self.attempt(lambda: self.storage.read(self.file))
        return "" if not read or found == self.data else "other bytes were read"

    def range(self) -> str:
        self.direct.write(self.file, self.data)
        read, found = self.attempt(lambda: self.storage.read_range(self.file, 1000, 9000))
        return "" if not read or found == self.data[1000:10_000] else "another range was read"

    def head(self) -> str:
        self.direct.write(self.file, self.data)
        read, found = self.attempt(lambda: self.storage.stat(self.file))
        return "" if not read or found == self.direct.stat(self.file) else "another size or etag"

    def list(self) -> str:
        keys = [f"{self.prefix}{number}/{name}" for number in range(3) for name in "ab"]
        for key in keys:
            self.direct.write(key, b"x")
        listed, found = self.attempt(lambda: [file.key for file in self.storage.list(self.prefix)])
        return "" if not listed or found == keys else f"listed {found}"

    def delete(self) -> str:
        self.direct.write(self.file, self.data)
        deleted, _ = self.attempt(lambda: self.storage.delete(self.file))
        found = self.content()
        if deleted:
            return "" if found is None else "deleted, and it is still there"
        return "" if found in (None, self.data) else "changed by a delete"


def play_all(cases: Sequence[Case], store: ObjectStore, *, seed: int, threads: int = 8) -> list[tuple[Case, str]]:
    """Cases at once, each under a prefix of its own; what went wrong in each."""
    with FaultProxy(store.endpoint, seed=seed) as proxy, ThreadPoolExecutor(threads) as pool:
        setting = Setting(store, proxy)

        def play(number: int) -> str:
            outcome: list[str] = []

            def run() -> None:
                try:
                    outcome.append(Played(cases[number], number, setting).run())
                except Exception as error:  # noqa: BLE001 - an error that is none for the user is what must not be
                    outcome.append(f"raises {type(error).__name__}: {error}")

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(HANGS_AFTER)
            return outcome[0] if outcome else "hangs"

        return list(zip(cases, pool.map(play, range(len(cases))), strict=True))


def faulty_requests(chance: Random, place: Path, *, most: int | None = None) -> Report:
    """B1: all cases, once or several times in a row, in a random order."""
    cases = all_cases(count=chance.choice((1, 1, 2, 3)))
    chance.shuffle(cases)
    with seaweed(place / "store") as store:
        found = play_all(cases[:most], store, seed=chance.randrange(10**6))
    return Report(faults=len(found), broken=[f"{case.name}: {wrong}" for case, wrong in found if wrong])


def few_faulty_requests(chance: Random, place: Path) -> Report:
    return faulty_requests(chance, place, most=20)
