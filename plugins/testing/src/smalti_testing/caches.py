"""The contract of a cache: what `smalti cache ls` and `smalti cache clear` expect. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smalti.plugins import Cache
from smalti_testing.contract import Contract, expect


@dataclass(frozen=True, kw_only=True)
class CacheSubject:
    """What the checks are given: `make` opens the cache, which is empty at first; `fill` puts something into it."""

    make: Callable[[], Cache]
    fill: Callable[[Cache], object]


CACHE: Contract[CacheSubject] = Contract("cache")


def check_cache(make: Callable[[], Cache], fill: Callable[[Cache], object]) -> None:
    """Every check of the contract. `make` opens the cache, which is empty, `fill` puts something into it."""
    CACHE.run_all(CacheSubject(make=make, fill=fill))


@CACHE.check
def an_empty_cache_is_counted_and_cleared(subject: CacheSubject) -> None:
    """Nothing was ever kept: that is no error. Count 0 and clear nothing, also if the folder does not exist."""
    cache = subject.make()
    expect(bool(cache.place), "it does not say where it is")
    expect((cache.entries(), cache.size()) == (0, 0), f"it has {cache.entries()} entries, {cache.size()} bytes")
    cleared = cache.clear()
    expect((cleared.count, cleared.bytes) == (0, 0), f"clearing nothing removed {cleared}")


@CACHE.check
def what_is_cleared_was_counted_and_is_gone(subject: CacheSubject) -> None:
    """`clear` tells what `entries` and `size` told before, and removes all of it. Looking changes nothing."""
    subject.fill(subject.make())
    cache = subject.make()
    before = (cache.entries(), cache.size())
    expect(min(before) > 0, f"what was put into it is not counted: {before[0]} entries, {before[1]} bytes")
    expect((cache.entries(), cache.size()) == before, "counting it changed it")
    cleared = cache.clear()
    expect((cleared.count, cleared.bytes) == before, f"it had {before[0]} entries, {before[1]} bytes, and cleared {cleared}")
    expect((cache.entries(), cache.size()) == (0, 0), "it is not empty after it was cleared")
    again = subject.make()
    expect((again.entries(), again.size()) == (0, 0), "it is not empty where it is opened again")
