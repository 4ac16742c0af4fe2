"""Reads of several entries: in the order of their places, near ones in one read, and of a remote storage several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from smalti.data import Threads
from smalti_cache.directory import Place

T = TypeVar("T")
R = TypeVar("R")

LOCAL_GAP = 16 << 10
"""Bytes between two entries of a local file for which they are still read at once: copying them costs about one more read."""
REMOTE_GAP = 128 << 10
"""The same for a remote storage, where a request costs about as much as a megabyte. It bounds what is read in vain."""
LARGEST = 8 << 20
"""Bytes of a read, unless an entry alone has more."""
AT_ONCE = 8
"""Requests to a remote storage at the same time, so at most 64 MiB are in memory beside the entries."""


@dataclass(frozen=True)
class Range:
    """Consecutive bytes of a file. `members` are the entries in them, as numbers of the list that was given."""

    file: str
    start: int
    stop: int
    members: tuple[int, ...]


def ranges_of(places: Sequence[Place], *, gap: int, largest: int = LARGEST) -> list[Range]:
    """Returns what to read for these entries, in the order of files and of places in them."""
    found: list[Range] = []
    for number in sorted(range(len(places)), key=lambda each: (places[each].file, places[each].offset, places[each].length)):
        place = places[number]
        stop = place.offset + place.length
        last = found[-1] if found else None
        if last and last.file == place.file and place.offset - last.stop <= gap and stop - last.start <= largest:
            found[-1] = Range(last.file, last.start, max(last.stop, stop), (*last.members, number))
        else:
            found.append(Range(place.file, place.offset, stop, (number,)))
    return found


def read_all(read: Callable[[T], R], items: Sequence[T], *, at_once: int) -> Iterator[R]:
    """Yields what `read` returns for each item, in order. Raises the first error."""
    count = min(at_once, len(items))
    if count <= 1:
        yield from map(read, items)
        return
    with Threads(count, "smalti-cache-read") as threads:
        yield from threads.map(read, items)
