"""Noise belongs to samples: it does not know of batches, ranks or the order of calls."""

import torch
from hypothesis import given, strategies as st

from smalti.diffusion.objective import SampleNoise

words = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def test_a_sample_has_the_same_noise_in_any_batch() -> None:
    noise = SampleNoise(7)
    whole = noise.normal(range(10), (3, 8, 8))
    ranks = [SampleNoise(7).normal(range(rank, 10, 2), (3, 8, 8)) for rank in (0, 1)]
    torch.testing.assert_close(whole[0::2], ranks[0], rtol=0, atol=0)
    torch.testing.assert_close(whole[1::2], ranks[1], rtol=0, atol=0)


def test_noise_is_unit_normal_and_independent_between_samples_and_seeds() -> None:
    first = SampleNoise(1).normal(range(64), (3, 32, 32)).flatten(1)
    other = SampleNoise(2).normal(range(64), (3, 32, 32)).flatten(1)
    assert abs(first.mean()) < 0.01
    assert abs(first.std() - 1) < 0.01
    correlations = torch.corrcoef(torch.cat([first, other])) - torch.eye(128)
    assert correlations.abs().max() < 0.1


def test_uniform_numbers_are_spread_evenly() -> None:
    u = torch.stack([SampleNoise(0).column(range(20_000), number) for number in range(2)])
    for column in u:
        counts = torch.histc(column, bins=20, min=0, max=1)
        assert (counts - 1000).abs().max() < 150
    assert torch.corrcoef(u)[0, 1].abs() < 0.03


def test_no_samples_give_no_noise() -> None:
    assert SampleNoise(0).normal([], (3, 2, 2)).shape == (0, 3, 2, 2)


@given(st.integers(), st.lists(words, max_size=4), st.integers(min_value=0, max_value=5))
def test_uniform_numbers_are_inside_0_and_1_and_do_not_depend_on_the_others(seed: int, numbers: list[int], column: int) -> None:
    u = SampleNoise(seed).column(numbers, column)
    assert u.shape == (len(numbers),)
    assert ((u > 0) & (u < 1)).all()
    assert torch.equal(u[:1], SampleNoise(seed).column(numbers[:1], column))


def test_noise_and_uniform_numbers_do_not_disturb_each_other() -> None:
    noise = SampleNoise(3)
    before = noise.normal([5], (4,))
    noise.column([5, 6], 3)
    assert torch.equal(noise.normal([5], (4,)), before)


def test_drawing_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    SampleNoise(3).normal([5], (4,))
    assert torch.equal(torch.get_rng_state(), state)
