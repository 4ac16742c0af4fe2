"""Runs on CUDA devices that are not there: nothing in the wrong place, nothing out of order, no more waiting than there was."""

import pytest

IN_EVERY_STEP = {"trainer.train_step": 2}
"""The host asks for the loss, then for the norm of the gradient."""


@pytest.fixture(scope="module")
def single(rehearsed):
    return rehearsed(rank=0, ranks=1)


@pytest.fixture(scope="module")
def sharded(rehearsed):
    return rehearsed("fsdp_enable", "use_ema", gradient_accumulation_steps=2)


def test_one_process_keeps_everything_on_its_device(single):
    assert single.parameters == {"cuda:0"}
    assert single.state == {("exp_avg", "cuda:0"), ("exp_avg_sq", "cuda:0"), ("step", "cuda:0")}
    assert single.resumed_state == single.state
    assert single.races == []


def test_a_sharded_rank_keeps_everything_on_its_device(sharded):
    assert sharded.parameters == sharded.averages == {"cuda:1"}
    assert sharded.state == {("exp_avg", "cuda:1"), ("exp_avg_sq", "cuda:1"), ("step", "cuda:1")}
    assert sharded.resumed_state == sharded.state
    assert sharded.races == []


@pytest.mark.parametrize("phase", ["second step", "save again", "resume"])
def test_the_host_waits_for_the_device_twice_a_step(sharded, phase):
    assert {name: count for name, count in sharded.waits(phase).items() if name in IN_EVERY_STEP} == IN_EVERY_STEP
