"""Stochastic rounding: unbiased, a function of its key and the place in the whole tensor, the same bits wherever it runs."""

import math

import pytest
import torch

from smalti_memory.updates import rounding
from smalti_memory.updates.rounding import key_of, random_bits, round_into

CPU = torch.device("cpu")


def reference(place: int, key: tuple[int, int]) -> int:
    """The random number of a place, in Python's numbers."""
    word = place // 2
    for half in key:
        word ^= half & 0xFFFFFFFF
        word ^= word >> 16
        word = word * 0x85EBCA6B & 0xFFFFFFFF
        word ^= word >> 13
        word = word * 0xC2B2AE35 & 0xFFFFFFFF
        word ^= word >> 16
    return word >> 16 if place % 2 else word & 0xFFFF


def rounded(values: torch.Tensor, begin: int = 0, key: tuple[int, int] = (1, 2)) -> torch.Tensor:
    found = torch.empty(len(values), dtype=torch.bfloat16)
    round_into(found, values, begin, key)
    return found


def test_random_numbers_are_those_of_the_function_that_is_described():
    key = key_of(7, 3, "blocks.0.weight")
    for begin in (0, 1, 12345, 2**31 + 1):
        found = random_bits(begin, 9, key, CPU).tolist()
        assert found == [reference(begin + place, key) for place in range(9)]


def test_other_seeds_steps_and_names_have_other_numbers():
    keys = [key_of(1, 1, "a"), key_of(2, 1, "a"), key_of(1, 2, "a"), key_of(1, 1, "b"), key_of(1, 11, "a"), key_of(11, 1, "a")]
    rows = torch.stack([random_bits(0, 10_000, key, CPU) for key in keys]).double()
    alike = torch.corrcoef(rows) - torch.eye(len(keys))
    assert alike.abs().max() < 0.05  # five standard deviations


@pytest.mark.parametrize("at_once", [2**22, 5])
def test_parts_are_rounded_as_the_whole(monkeypatch, at_once):
    values = torch.randn(41, generator=torch.Generator().manual_seed(1))
    whole = rounded(values)
    monkeypatch.setattr(rounding, "_AT_ONCE", at_once)
    for cut in (1, 6, 20):
        assert torch.equal(torch.cat([rounded(values[:cut]), rounded(values[cut:], cut)]), whole)


@pytest.mark.parametrize("value", [1.0 - 1e-5, 1.0 + 1e-3, -3.3, 1e-20, -7e-42, 3.0])
def test_the_mean_is_the_number(value):
    count = 200_000
    found = rounded(torch.full((count,), value)).double()
    below, above = found.min().item(), found.max().item()
    exact = torch.tensor(value).double().item()
    assert below <= exact <= above
    deviation = (above - below) / 2 / math.sqrt(count)
    assert abs(found.mean().item() - exact) <= 4 * deviation
    if value == 3.0:
        assert below == above, "a number of bf16 stays what it is"


def test_small_steps_add_up():
    weight = torch.ones(1000, dtype=torch.bfloat16)
    for step in range(1000):
        weight = rounded(weight.float() * (1 - 1e-5), key=key_of(0, step, "weight"))
    assert weight.double().mean().item() == pytest.approx(0.99, abs=1e-3), "to the nearest, it would be 1"


def test_what_is_not_finite_stays_so():
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)
    found = rounded(bits.view(torch.float32))
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert found[2:].isnan().all()
    assert rounded(torch.tensor([3.4e38] * 50)).max().item() == math.inf, "beyond the largest number of bf16 there is no other"
