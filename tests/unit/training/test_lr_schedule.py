"""When the loop draws and saves, and how the learning rate moves."""

import pytest
import torch
from hypothesis import given, strategies as st

from smalti import RunState
from smalti.config import OptimizerOptions
from smalti.training.optim.lr_schedule import Cadence, build_scheduler, learning_rate

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


def evaluating(steps: int = 0, epochs: int = 0, per_epoch: int = 3) -> list[int]:
    """After which of ten steps the loss on held-out samples_images is measured, when an epoch has so many batches."""
    cadence = Cadence(
        validation_interval=0,
        checkpoint_interval=0,
        samples_images=False,
        evaluation_interval=steps,
        evaluation_epochs=epochs,
        epoch_of=lambda position: position // per_epoch,
    )
    states = [RunState(max_steps=10, step=step, position=step, epoch=(step - 1) // per_epoch) for step in range(1, 11)]
    return [state.step for state in states if cadence.should_evaluate(state)]


def test_evaluation_comes_at_its_steps_after_its_epochs_and_at_the_end():
    assert [evaluating(), evaluating(steps=4), evaluating(epochs=1), evaluating(epochs=2)] == [
        [10],
        [4, 8, 10],
        [3, 6, 9, 10],
        [6, 10],
    ]


def test_without_anything_held_out_nothing_is_evaluated():
    assert not cadence().should_evaluate(RunState(max_steps=1, step=1))


def cadence(validation: int = 0, checkpoint: int = 0, *, samples_images: bool = True) -> Cadence:
    return Cadence(validation_interval=validation, checkpoint_interval=checkpoint, samples_images=samples_images)


def test_samples_images_are_drawn_at_the_interval_and_at_the_end():
    steps = [step for step in range(1, 11) if cadence(validation=4).should_validate(RunState(max_steps=10, step=step))]
    assert steps == [4, 8, 10]


def test_nothing_is_drawn_without_prompts():
    state = RunState(max_steps=10, step=10, validation_requested=True)
    assert not cadence(validation=5, samples_images=False).should_validate(state)


def test_a_step_that_was_left_out_does_not_save_the_last_one_again():
    assert not cadence(checkpoint=4).should_save(RunState(max_steps=10, step=4, skipped=1))


def test_a_request_is_enough_to_save():
    assert cadence().should_save(RunState(max_steps=10, step=3, save_requested=True))
