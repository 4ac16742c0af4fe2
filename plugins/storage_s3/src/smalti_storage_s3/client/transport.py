"""What a client library has to do: one request at a time, without retries. Two implementations: `boto`, `fast`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

DIGEST = "smalti-blake3"
"""The metadata of an object that has the digest of its bytes, in hexadecimal digits."""
WRITER = "smalti-writer"
"""The metadata of an object that was written conditionally: a random name of the writer."""

Block = bytes | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What the store says about an object. `size` is that of the whole object, `etag` has no quotes."""

    size: int
    etag: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The beginning of a read: `length` bytes from `start` will come in `blocks`, which may raise a Fault."""

    head: Head
    start: int
    length: int
    blocks: Iterator[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A part of a listing. `more`: the list goes on after the last key. `token`: from where.

    `by_folder`: the store does not sort by whole key. `received` is the length of the answer in bytes.
    """

    keys: list[str]
    sizes: list[int]
    etags: list[str]
    more: bool
    by_folder: bool = False
    token: str = ""
    received: int = 0

    def without(self, length: int) -> Page:
        """The same page without the first characters of each key."""
        return replace(self, keys=[key[length:] for key in self.keys])


class Transport(Protocol):
    """Requests for small objects. Each method sends one request, from any thread, and raises a Fault if it fails."""

    name: str

    def get(self, key: str, start: int, end: int | None, etag: str | None) -> Answer:
        """The bytes from `start` to `end` (exclusive; None: to the end), of the object with this etag if one is given."""
        ...

    def put(self, key: str, data: Block, metadata: Mapping[str, str], *, new: bool = False) -> None:
        """Write an object whole, with a checksum that the store refuses other bytes by. `new`: only if there is none."""
        ...

    def head(self, key: str) -> Head: ...

    def delete(self, key: str) -> None: ...
