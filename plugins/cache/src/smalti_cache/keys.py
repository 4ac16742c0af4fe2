"""Keys of cache entries: 128 bits, computed for many entries at once from columns of numbers and texts.

A `Hasher` is given everything that an entry depends on, one column after the other. Two entries have the same key only if all
of their columns are the same, except with a probability of about 2**-128 per pair. The hash is not cryptographic: whoever can
choose the names of images can make two of them share an entry. Changing anything here makes all cached entries unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

Key = tuple[int, int]
"""One key: its upper and its lower 64 bits."""

_MASK = (1 << 64) - 1
# Of MurmurHash3 and SplitMix64 (public domain); a pair for each half of the key.
_FACTORS = ((0x87C37B91114253D5, 0x4CF5AD432745937F), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FINAL = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_ROUND = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys as two columns."""

    high: U64
    low: U64

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, chosen: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Keys:
        return Keys(self.high[chosen], self.low[chosen])

    def key(self, place: int) -> Key:
        return int(self.high[place]), int(self.low[place])

    def order(self) -> NDArray[np.intp]:
        """The places of the keys in ascending order; equal ones stay in their order."""
        order = np.argsort(self.high, kind="stable")
        high = self.high[order]
        if len(high) and bool((high[1:] == high[:-1]).any()):
            return np.lexsort((self.low, self.high))
        return order

    @staticmethod
    def of(keys: Sequence[Key]) -> Keys:
        columns = np.array(keys, dtype=np.uint64).reshape(-1, 2)
        return Keys(columns[:, 0].copy(), columns[:, 1].copy())

    @staticmethod
    def joined(parts: Sequence[Keys]) -> Keys:
        empty = [np.empty(0, dtype=np.uint64)]
        return Keys(np.concatenate(empty + [one.high for one in parts]), np.concatenate(empty + [one.low for one in parts]))


class Hasher:
    """Hashes rows of columns. `what` is the same for all rows: it names what the keys are of, and constant parts.

    Args:
        what: any texts.
        rows: how many.
    """

    def __init__(self, rows: int, *what: str) -> None:
        self._lanes = [np.full(rows, seed, dtype=np.uint64) for seed in _seeds(what)]

    def numbers(self, column: NDArray[Any] | int) -> Hasher:
        """Add a column of numbers, or one number for all rows."""
        values = np.broadcast_to(np.asarray(column), self._lanes[0].shape).astype(np.int64).view(np.uint64)
        for lane, state in enumerate(self._lanes):
            _absorb(state, values, lane)
        return self

    def texts(self, column: pa.Array) -> Hasher:
        """Add a column of texts, without nulls. Costs memory for as many bytes as the texts have."""
        starts, sizes, words = _words(column)
        for lane, state in enumerate(self._lanes):
            _absorb(state, sizes.view(np.uint64), lane)
        active = np.arange(len(sizes))
        longest, word = int(sizes.max(initial=0)), 0
        while 8 * word < longest:
            if 8 * word >= int(sizes[active].min()):  # some texts have ended
                active = active[sizes[active] > 8 * word]
            rest = np.minimum(sizes[active] - 8 * word, 8)
            values = words[starts[active] + 8 * word] & _LOWEST[rest]
            for lane, state in enumerate(self._lanes):
                if len(active) == len(state):
                    _absorb(state, values, lane)
                else:
                    some = state[active]
                    _absorb(some, values, lane)
                    state[active] = some
            word += 1
        return self

    def keys(self) -> Keys:
        """The keys of all rows. Nothing may be added afterwards."""
        for state in self._lanes:
            state ^= state >> np.uint64(33)
            state *= np.uint64(_FINAL[0])
            state ^= state >> np.uint64(33)
            state *= np.uint64(_FINAL[1])
            state ^= state >> np.uint64(33)
        return Keys(self._lanes[0], self._lanes[1])


def single_key(what: Sequence[str], *values: int | str) -> Key:
    """The key of one row with these values: that of a `Hasher`, but faster for a single row."""
    lanes = []
    for lane, state in enumerate(_seeds(what)):
        for value in values:
            if isinstance(value, int):
                state = _absorbed(state, value & _MASK, lane)
                continue
            data = value.encode()
            state = _absorbed(state, len(data), lane)
            for place in range(0, len(data), 8):
                state = _absorbed(state, int.from_bytes(data[place : place + 8], "little"), lane)
        state ^= state >> 33
        state = state * _FINAL[0] & _MASK
        state ^= state >> 33
        state = state * _FINAL[1] & _MASK
        lanes.append(state ^ state >> 33)
    return lanes[0], lanes[1]


_LOWEST = np.array([(1 << 8 * size) - 1 for size in range(9)], dtype=np.uint64)
"""Masks for the first bytes of a little-endian word."""


def _absorb(state: U64, values: U64, lane: int) -> None:
    """Mix a column of numbers into a column of states, in place. One-to-one for each, given the other."""
    first, second = _FACTORS[lane]
    mixed = values * np.uint64(first)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(second)
    mixed ^= mixed >> np.uint64(29)
    state ^= mixed
    state *= np.uint64(_FACTORS[1 - lane][0])
    state ^= state >> np.uint64(32)
    state += np.uint64(_ROUND[lane])


def _absorbed(state: int, value: int, lane: int) -> int:
    """`_absorb` for one row."""
    first, second = _FACTORS[lane]
    value = value * first & _MASK
    value ^= value >> 31
    value = value * second & _MASK
    value ^= value >> 29
    state = (state ^ value) * _FACTORS[1 - lane][0] & _MASK
    state ^= state >> 32
    return state + _ROUND[lane] & _MASK


def _seeds(what: Sequence[str]) -> tuple[int, int]:
    digest = blake2b("\0".join(what).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _words(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], U64]:
    """Returns where each text starts, its bytes, and the 8 bytes from any place on as a little-endian number."""
    wide = pa.types.is_large_string(column.type)
    offsets: NDArray[Any] = np.frombuffer(
        column.buffers()[1], dtype=np.int64 if wide else np.int32, count=column.offset + len(column) + 1
    )
    offsets = offsets[column.offset :].astype(np.int64) if len(column) else np.zeros(1, dtype=np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + 8, dtype=np.uint8)  # so that 8 bytes follow every place
    if last > first:
        data[:-8] = np.frombuffer(column.buffers()[2], dtype=np.uint8)[first:last]
    first_word = data[:8].view("<u8")
    words = np.lib.stride_tricks.as_strided(first_word, shape=(len(data) - 7,), strides=(1,), writeable=False)
    starts: NDArray[np.int64] = offsets[:-1] - first
    return starts, np.diff(offsets), words
