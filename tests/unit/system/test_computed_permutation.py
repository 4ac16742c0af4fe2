"""Permutations that are computed place by place: complete, frozen, and as even as stored ones, where three rounds are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smalti.system.stateless_random import ComputedPermutation, derive_seed

Numbers = NDArray[np.int64]

SIZE, CELLS, KEYS = 65_600, 16, 24
PLACES = np.arange(SIZE)
BLOCK = SIZE // CELLS


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_number_has_one_place(size: int, key: int) -> None:
    assert sorted(ComputedPermutation(size, key)(np.arange(size)).tolist()) == list(range(size))


def test_a_place_does_not_depend_on_the_others_that_are_asked_for() -> None:
    permutation = ComputedPermutation(100_003, 5)
    whole = permutation(np.arange(100_003))

    assert permutation(np.array([70_000, 3, 99_999])).tolist() == whole[[70_000, 3, 99_999]].tolist()


def test_the_numbers_are_what_they_always_were() -> None:
    """Frozen values: if they change, no large run can be resumed over the change."""
    assert ComputedPermutation(100_000_000, 42)(np.arange(5)).tolist() == [18226025, 77903603, 58298226, 14687901, 4926324]
    assert ComputedPermutation(65_537, 2**64 - 1)(np.arange(65_532, 65_537)).tolist() == [38206, 10533, 6996, 38055, 11787]
    assert ComputedPermutation(2**32 - 1, 7)(np.array([0, 2**31, 2**32 - 2])).tolist() == [984820269, 2121925679, 687914144]


def in_plain_python(size: int, key: int, place: int) -> int:
    word = 2**64 - 1

    def splitmix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & word
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & word
        return state ^ (state >> 31)

    def scrambled(value: int, number: int, bits: int) -> int:
        value = (value + splitmix(key + (number + 1) * 0x9E3779B97F4A7C15 & word)) * 0xBF58476D1CE4E5B9 & word
        return ((value ^ (value >> 32)) * 0x94D049BB133111EB & word) >> (64 - bits)

    bits = max(2, (size - 1).bit_length())
    low_bits, high_bits = bits // 2, bits - bits // 2
    while True:
        low, high = place % 2**low_bits, place >> low_bits
        for number in range(0, 6, 2):
            low ^= scrambled(high, number, low_bits)
            high ^= scrambled(low, number + 1, high_bits)
        place = high << low_bits | low
        if place < size:
            return place


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2**32), st.integers(0, 2**64 - 1), st.data())
def test_the_numbers_are_those_of_plain_python(size: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))

    assert ComputedPermutation(size, key)(np.array([place])).tolist() == [in_plain_python(size, key, place)]


def deviation(observed: Numbers, expected: object, freedom: int) -> float:
    """Standard deviations of a chi-square sum from its mean."""
    found = float(((observed - expected) ** 2 / expected).sum())
    return (found - freedom) / math.sqrt(2 * freedom)


def deviations(rounds: int) -> dict[str, float]:
    """How far from chance: place against number, distance and blocks of neighbours, places mod 8 against numbers mod 10,
    parities of neighbours, the same place under the next key. Expectations are exact for a random permutation.
    """
    blocks, distances, pairs, digits, parities, keys = (np.zeros(size) for size in (256, 64, 256, 80, 4, 256))
    before: Numbers | None = None
    for number in range(KEYS):
        values = ComputedPermutation(SIZE, derive_seed("pass", number), rounds)(PLACES)
        block = values // BLOCK
        blocks += np.bincount(PLACES // BLOCK * CELLS + block, minlength=256)
        distances += np.bincount((values[1:] - values[:-1]) % SIZE * 64 // SIZE, minlength=64)
        pairs += np.bincount(block[:-1] * CELLS + block[1:], minlength=256)
        digits += np.bincount(PLACES % 8 * 10 + values % 10, minlength=80)
        parities += np.bincount((values[:-1] & 1) * 2 + (values[1:] & 1), minlength=4)
        if before is not None:
            keys += np.bincount(before * CELLS + block, minlength=256)
        before = block
    neighbours = KEYS * (SIZE - 1)
    same, other = BLOCK * (BLOCK - 1), BLOCK * BLOCK
    expected_pairs = np.where(np.eye(CELLS, dtype=bool), same, other).ravel() / (SIZE * (SIZE - 1))
    expected_distances = np.bincount(PLACES[1:] * 64 // SIZE, minlength=64) / (SIZE - 1)
    half = SIZE // 2
    expected_parities = np.array([half - 1, half, half, half - 1]) * half / (SIZE * (SIZE - 1))
    return {
        "grid": deviation(blocks, KEYS * SIZE / 256, 225),
        "distances": deviation(distances, neighbours * expected_distances, 63),
        "pairs": deviation(pairs, neighbours * expected_pairs, 255),
        "digits": deviation(digits, KEYS * SIZE / 80, 63),
        "parities": deviation(parities, neighbours * expected_parities, 3),
        "next key": deviation(keys, (KEYS - 1) * SIZE / 256, 225),
    }


def test_six_rounds_are_as_even_as_chance_and_three_are_not() -> None:
    six, three = deviations(6), deviations(3)

    assert max(map(abs, six.values())) < 4.5, six
    assert min(three["grid"], three["distances"], three["pairs"]) > 8, three  # the control: these tests can fail


def test_an_empty_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ComputedPermutation(0, 1)
