"""An order of samples for caches on remote storages: what is near in a pack is trained about the same time.

A block is samples that follow one another in a dataset and bucket, as they do in a pack. A pass permutes the blocks. Each place
of a batch takes its samples from a few blocks of its own, in a random order, and gets the next ones when they are used up. So
however ranks share a batch, a block is wanted by one of them, which can read it at once (`reads.blocks`). The blocks that all
places have at a time are a window: `batch * blocks * size` samples, which are mixed.

What does not fill windows, less than one and less than a block of each dataset, has a window of its own at a random place of
the pass. There, blocks are divided among places so that few have a part of the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smalti import Config
from smalti.system import ComputedPermutation, derive_seed, derive_seeds, mixed, permutation
from smalti_cache.options import CacheOptions

Numbers = NDArray[np.int64]

_STORED = 1 << 16
"""Numbers up to which a permutation is stored. Changing it changes the order of runs."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class BlockOrder:
    """The `smalti.data.Passes` of blocks with `size` samples, of which a place of a batch has `blocks` at a time."""

    size: int
    blocks: int

    @property
    def settings(self) -> dict[str, object]:
        return {"data_order_block": self.size, "data_order_window": self.blocks}

    def __call__(self, parts: Sequence[tuple[int, int]], batch: int, key: int) -> Callable[[Numbers], Numbers]:
        return _BlockPass(parts, batch, key, self.size, self.blocks)


def block_order(config: Config) -> BlockOrder | None:
    """The order that the options ask for; None for a permutation of all samples."""
    options = config[CacheOptions]
    return None if options.data_order_block == 1 else BlockOrder(options.data_order_block, options.data_order_window)


class _BlockPass:
    """One pass. Blocks are numbered through the parts, and in each through its copies; so are the rows that do not fill one."""

    def __init__(self, parts: Sequence[tuple[int, int]], batch: int, key: int, size: int, blocks: int) -> None:
        self._rows, self._copies = np.array(parts, dtype=np.int64).T
        self._starts = np.cumsum(self._rows * self._copies) - self._rows * self._copies
        self._size, self._blocks, self._batch, self._key = size, blocks, batch, key
        self._whole = self._rows // size
        self._ends = np.cumsum(self._whole * self._copies)
        self._loose = self._rows % size
        self._loose_ends = np.cumsum(self._loose * self._copies)
        count = int(self._ends[-1])
        self._windows = count // (batch * blocks)
        self._window = batch * blocks * size
        self._others = int(np.sum(self._rows * self._copies)) - self._windows * self._window
        self._turn = derive_seed("others", key) % (self._windows + 1) * self._window
        self._order = _permuted(count, derive_seed("blocks", key))
        self._loose_order = _permuted(int(self._loose_ends[-1]), derive_seed("loose", key))

    def __call__(self, positions: Numbers) -> Numbers:
        """Returns the places at these positions of the pass."""
        places = np.empty_like(positions)
        after = positions - self._turn
        others = (after >= 0) & (after < self._others)
        places[others] = self._among_others(after[others])
        places[~others] = self._in_windows(positions[~others] - np.where(after >= self._others, self._others, 0)[~others])
        return places

    def _in_windows(self, positions: Numbers) -> Numbers:
        window, inside = np.divmod(positions, self._window)
        turn, slot = np.divmod(inside, self._batch)
        group = window * self._batch + slot
        block, member = np.divmod(self._mixed(group, turn, self._blocks * self._size), self._size)
        return self._placed(group * self._blocks + block, member)

    def _among_others(self, positions: Numbers) -> Numbers:
        """Consecutive numbers are given to each slot of a batch in turn: a block's members to as few slots as possible."""
        turns, more = divmod(self._others, self._batch)
        turn, slot = np.divmod(positions, self._batch)
        block, member = np.divmod(slot * turns + np.minimum(slot, more) + turn, self._size)
        block += self._windows * self._batch * self._blocks
        count, places = int(self._ends[-1]), np.empty_like(positions)
        whole = block < count
        # No group of a window has the number of a block here, which is at least that of all groups.
        places[whole] = self._placed(block[whole], self._mixed(block[whole], member[whole], self._size))
        loose = self._loose_order((block - count)[~whole] * self._size + member[~whole])
        part = np.searchsorted(self._loose_ends, loose, side="right")
        loose -= (self._loose_ends - self._loose * self._copies)[part]
        copy, row = np.divmod(loose, self._loose[part])
        places[~whole] = self._starts[part] + (self._whole[part] * self._size + row) * self._copies[part] + copy
        return places

    def _mixed(self, groups: Numbers, members: Numbers, size: int) -> Numbers:
        """Returns what comes to the place of each member in a permutation of its group."""
        distinct, which = np.unique(groups, return_inverse=True)
        keys = derive_seeds("group", self._key, last=distinct.astype(np.uint64))
        hashes = mixed((keys[:, None] + np.arange(size, dtype=np.uint64) * _ODD).view(np.int64))
        return np.argsort(hashes, axis=1, kind="stable")[which, members]

    def _placed(self, blocks: Numbers, members: Numbers) -> Numbers:
        """Returns the places of members of blocks, which are numbered in the order of the pass."""
        blocks = self._order(blocks)
        part = np.searchsorted(self._ends, blocks, side="right")
        blocks -= (self._ends - self._whole * self._copies)[part]
        copy, number = np.divmod(blocks, self._whole[part])
        places: Numbers = self._starts[part] + (number * self._size + members) * self._copies[part] + copy
        return places


def _permuted(size: int, key: int) -> Callable[[Numbers], Numbers]:
    if size > _STORED:
        return ComputedPermutation(size, key)
    stored = permutation(size, key)
    return lambda places: stored[places]
