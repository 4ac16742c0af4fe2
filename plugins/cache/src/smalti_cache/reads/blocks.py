"""Entries that are read before they are wanted, together with their neighbours (`block_order`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from smalti import UserError
from smalti_cache.entries import Entry

_log = logging.getLogger(__name__)

Wanted = tuple[int, bool]
"""A sample, and whether its image is flipped."""
Entries = dict[Wanted, Entry]


@dataclass(frozen=True)
class Block:
    """Samples that follow one another in a part of a bucket: its place in the order, the part, and the number of the block."""

    bucket: int
    part: int
    number: int


class BlockReads:
    """Entries of blocks, which wait until each is wanted once. All methods may be called from several threads.

    Args:
        read: returns the entries of each of some blocks.
        limit: bytes that may wait. If there are more, the blocks that were read first are dropped.
    """

    def __init__(self, read: Callable[[Sequence[Block]], Sequence[Entries]], limit: int) -> None:
        self._read = read
        self._limit = limit
        self._blocks: dict[Block, Future[Entries]] = {}
        self._bytes = 0
        self._reported = False
        self._lock = threading.Lock()

    def take(self, wanted: Sequence[tuple[Block, Wanted]]) -> list[Entry | None]:
        """Returns entries, and forgets them; None for what was taken before, and of blocks that cannot be read."""
        mine: dict[Block, Future[Entries]] = {}
        with self._lock:
            for block, _ in wanted:
                if block not in self._blocks:
                    self._blocks[block] = mine[block] = Future()
            reads = {block: self._blocks[block] for block, _ in wanted}
        if mine:
            self._fill(mine)
        blocks = {block: read.result() for block, read in reads.items()}
        with self._lock:
            found = [self._taken(blocks[block], one) for block, one in wanted]
            for block, read in reads.items():
                if not blocks[block] and self._blocks.get(block) is read:
                    del self._blocks[block]
        return found

    def _fill(self, blocks: Mapping[Block, Future[Entries]]) -> None:
        found: Sequence[Entries] = [{} for _ in blocks]
        try:
            found = self._read(list(blocks))
        except (UserError, KeyError):
            pass  # reading the entries one by one finds out which it is
        finally:
            with self._lock:
                self._bytes += sum(_size(entry) for entries in found for entry in entries.values())
                self._make_room(blocks)
            for read, entries in zip(blocks.values(), found, strict=True):
                read.set_result(entries)

    def _make_room(self, new: Mapping[Block, object]) -> None:
        for block, read in list(self._blocks.items()):
            if self._bytes <= self._limit:
                return
            if block in new or not read.done():
                continue
            if not self._reported:
                self._reported = True
                _log.warning(
                    "latents are read twice: raise --data_order_gb, or lower --data_order_block or --data_order_window"
                )
            del self._blocks[block]
            self._bytes -= sum(map(_size, read.result().values()))
            read.result().clear()

    def _taken(self, entries: Entries, wanted: Wanted) -> Entry | None:
        sample, flipped = wanted
        found, other = entries.pop(wanted, None), entries.pop((sample, not flipped), None)  # a visit is of one of them
        self._bytes -= sum(_size(entry) for entry in (found, other) if entry is not None)
        return found


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for tensor in entry.values())
