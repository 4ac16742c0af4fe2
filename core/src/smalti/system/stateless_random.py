"""Random numbers as pure functions of a key: the same in every process and with every version of numpy.

A key is a 64-bit hash of parts ("crop", seed, number ...). From a key come a number, a choice or a permutation. The mixing
function is that of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def derive_seed(*parts: int | str) -> int:
    """A 64-bit key that depends on every part and on their order. Integers count modulo 2**64."""
    key = 0
    for part in parts:
        number = part & _WORD if isinstance(part, int) else text_hash(part)
        key = _mix(_mix(number + _GAMMA & _WORD) ^ (key + _GAMMA & _WORD))
    return key


def derive_seeds(*parts: int | str, last: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`derive_seed(*parts, number)` for each number of `last`."""
    values = last + np.uint64(_GAMMA)
    _mix_array(values)
    values ^= np.uint64(derive_seed(*parts) + _GAMMA & _WORD)
    _mix_array(values)
    return values


def text_hash(text: str) -> int:
    """A 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def as_signed(key: int) -> int:
    """The same 64 bits as a signed integer, for tables that have no unsigned type."""
    return key - (1 << 64) if key >> 63 else key


def uniform(key: int) -> float:
    """A number in [0, 1)."""
    return (_mix(key) >> 11) / (1 << 53)


def uniform_single(key: int) -> float:
    """A number strictly between 0 and 1, which single precision can hold exactly."""
    return ((key >> 41) + 0.5) / (1 << 23)


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """The numbers 0 to size-1, sorted by their hash under `key`, then by number."""
    values = np.arange(1, size + 1, dtype=np.uint64)
    values *= np.uint64(_GAMMA)
    values += np.uint64(key)
    _mix_array(values)
    # Sorting what is nearly sorted is several times as fast, and 16 bits are sorted by a radix sort.
    nearly = np.argsort((values >> np.uint64(48)).astype(np.uint16), kind="stable")
    return nearly[np.argsort(values[nearly], kind="stable")].astype(np.int64, copy=False)


def mixed(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each number."""
    words = values.astype(np.uint64)
    words += np.uint64(_GAMMA)
    _mix_array(words)
    return words


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _FIRST & _WORD
    value = (value ^ (value >> 27)) * _SECOND & _WORD
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> None:
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)


class ComputedPermutation:
    """A permutation of the numbers 0 to size-1 that is computed place by place: no memory, whatever the size.

    Six rounds of an unbalanced Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) over the
    next power of two, repeated while the result is outside (cycle walking; fewer than two turns on average). Three rounds are
    visibly not random. For sizes above 2**16: the network has too few keys to reach all permutations of small sets evenly,
    which `permutation` does.
    """

    def __init__(self, size: int, key: int, rounds: int = 6) -> None:
        if size < 1:
            raise ValueError("a permutation has at least one number")
        bits = max(2, (size - 1).bit_length())
        self.size = size
        self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._mask = np.uint64((1 << (bits // 2)) - 1)
        self._keys = [np.uint64(_mix(key + (number + 1) * _GAMMA & _WORD)) for number in range(rounds)]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers at these places."""
        values = self._once(places.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            again = self._once(values[outside])
            values[outside] = again
            outside = outside[again >= self.size]
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = values & self._mask, values >> self._low
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                low ^= _scrambled(high, key, self._low)
            else:
                high ^= _scrambled(low, key, self._high)
        high <<= self._low
        high |= low
        return high


def _scrambled(values: NDArray[np.uint64], key: np.uint64, bits: np.uint64) -> NDArray[np.uint64]:
    """`bits` random bits of each value under a key."""
    mixed = values + key
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_SECOND)
    mixed >>= np.uint64(64) - bits
    return mixed
