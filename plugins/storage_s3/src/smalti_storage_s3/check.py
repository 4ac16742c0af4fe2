"""Tries what a dataset, a cache or a mirror needs of a bucket, and says what is missing."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from smalti.data import MissingFileError, StorageError
from smalti_storage_s3.client.storage import S3Storage

_SAMPLE = 16_384


@dataclass(frozen=True, kw_only=True)
class Result:
    """One thing that was tried. `ok` None: not tried, or it is neither right nor wrong."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def check(storage: S3Storage, *, write: bool) -> list[Result]:
    """Tries to list and to read; with `write`, also to write an object of its own, which it removes again."""
    results: list[Result] = []

    def attempt(name: str, action: Callable[[], str]) -> bool:
        try:
            results.append(Result(name=name, ok=True, detail=action()))
        except StorageError as error:
            results.append(Result(name=name, ok=False, detail=error.message, fix=error.fix))
        return bool(results[-1].ok)

    first: list[str] = []

    def listing() -> str:
        first.extend(file.key for file in islice(storage.list(), 1))
        return f"the first file is {first[0]}" if first else "no files"

    if not attempt("list", listing):
        return results  # the rest would fail for the same reason
    if first:
        attempt("read", lambda: _speed(storage, first[0]))
    if write:
        _check_writing(storage, attempt)
    attempt("abandoned uploads", lambda: _abandoned(storage))
    return results


def _check_writing(storage: S3Storage, attempt: Callable[[str, Callable[[], str]], bool]) -> None:
    key = f".smalti-check-{secrets.token_hex(8)}"

    def written() -> str:
        storage.write(key, bytes(_SAMPLE))
        return "ok" if storage.read(key) == bytes(_SAMPLE) else "other bytes came back"

    def deleted() -> str:
        storage.delete(key)
        try:
            storage.stat(key)
        except MissingFileError:
            return "ok"
        return "the file is still there: the bucket may keep versions"

    if attempt("write", written):
        attempt("delete", deleted)
        attempt("create once", lambda: "yes" if storage.creates_once else _NOT_ONCE)


_NOT_ONCE = "no: the store replaces files although it is asked not to; two runs must not write to one mirror at once"


def _speed(storage: S3Storage, key: str) -> str:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        storage.read_range(key, 0, _SAMPLE)
        seconds.append(time.perf_counter() - began)
    return f"{statistics.median(seconds) * 1000:.0f} ms for a request, with {storage.transport}"


def _abandoned(storage: S3Storage) -> str:
    found = storage.abandoned_uploads()
    return f"{len(found)} older than a day take space: --abort_abandoned" if found else "none"
