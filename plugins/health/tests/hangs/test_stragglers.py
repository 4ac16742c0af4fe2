"""A rank that is steadily slower than the others is reported once; noise is not."""

import random

import pytest

from smalti_health.hangs.stragglers import Stragglers


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_of_half_the_speed_is_found_and_noise_of_15_percent_is_not(ranks, seed):
    chance, scores, slow = random.Random(seed), Stragglers(), seed % ranks
    noise = [{rank: chance.uniform(0.85, 1.15) for rank in range(ranks)} for _ in range(50)]
    assert not any(scores.update(window) for window in noise)
    found = [scores.update({**window, slow: 2 * window[slow]}) for window in noise[:3]]
    assert [list(each) for each in found] == [[], [], [slow]]
    assert 0.3 < found[2][slow] < 0.75
    assert scores.update({**noise[0], slow: 2.0}) == {}


def test_one_slow_window_is_not_enough():
    scores = Stragglers()
    assert not any(scores.update({0: 1.0, 1: 1.0, 2: 3.0 if number % 3 else 1.0}) for number in range(30))


def test_a_rank_that_was_not_measured_does_not_count():
    scores = Stragglers()
    assert not any(scores.update({0: 1.0, 1: 0.0}) for _ in range(5))
