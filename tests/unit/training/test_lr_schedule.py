"""How the learning rate moves."""

import pytest
import torch
from hypothesis import given, strategies as st

from smalti.config import OptimizerOptions
from smalti.training.optim.lr_schedule import build_scheduler, learning_rate

SHAPES = ["constant", "constant_with_warmup", "linear", "cosine", "polynomial", "warmup_stable_decay"]


def options(**values) -> OptimizerOptions:
    return OptimizerOptions(**values)


@given(st.sampled_from(SHAPES), st.integers(0, 50), st.integers(1, 500), st.floats(0, 1))
def test_a_rate_stays_between_nothing_and_its_peak(shape, warmup, total, end):
    factor = learning_rate(options(lr_scheduler=shape, lr_warmup_steps=warmup, lr_end_ratio=end), total)
    assert all(0 <= factor(step) <= 1 for step in range(total + 2))


@pytest.mark.parametrize("shape", ["linear", "cosine", "polynomial", "warmup_stable_decay"])
def test_a_falling_rate_ends_at_its_end_ratio(shape):
    factor = learning_rate(options(lr_scheduler=shape, lr_warmup_steps=10, lr_end_ratio=0.05), 100)
    assert factor(100) == pytest.approx(0.05)


def test_warm_up_rises_in_equal_steps_to_the_peak():
    factor = learning_rate(options(lr_warmup_steps=4), 100)
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_cosine_is_half_way_down_in_the_middle():
    assert learning_rate(options(lr_scheduler="cosine"), 100)(50) == pytest.approx(0.5)


@given(st.integers(1, 50), st.integers(1, 40), st.floats(0, 1))
def test_a_cosine_with_steps_of_its_own_falls_and_rises_whatever_the_length_of_the_run(warmup, steps, end):
    chosen = options(lr_scheduler="cosine", lr_cosine_steps=steps, lr_warmup_steps=warmup, lr_end_ratio=end)
    factor = learning_rate(chosen, 7)
    turns = [factor(warmup + turn * steps) for turn in range(5)]
    assert turns == pytest.approx([1, end, 1, end, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_that_begins_in_the_middle_is_the_one_that_came_there(shape):
    def rates(first: int, last: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = build_scheduler(optimizer, options(lr_scheduler=shape, lr_warmup_steps=5, learning_rate=0.3), 40, first)
        found = []
        for _ in range(first, last):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(17, 40) == rates(0, 40)[17:]
