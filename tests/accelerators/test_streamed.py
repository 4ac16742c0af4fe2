"""Frozen weights that come from host memory, on a CUDA device that is not there: in order, and without waiting."""

import pytest

from accelerators.orderly import Orderly

FLUX = {
    "family": "flux",
    "rank": 0,
    "ranks": 1,
    "flags": ["stream_base", "gradient_checkpointing"],
    "model_type": "lora",
    "lora_rank": 4,
    "gradient_accumulation_steps": 2,
}
RUNS = {"flux": FLUX, "flux, int8": FLUX | {"base_model_precision": "int8-rowwise"}}

every_run = pytest.mark.parametrize("seen", RUNS, indirect=True)


@every_run
class TestOrder(Orderly):
    """A block computes when it has arrived; another takes its place when the last product with it was computed."""


@every_run
def test_the_host_waits_for_the_device_as_often_as_without_it(seen):
    assert seen.waits("second step") == {"training.trainer.train_step": 2}


@every_run
def test_what_trains_is_on_the_device_and_what_is_streamed_is_not(seen):
    assert seen.parameters == {"cuda:0", "cpu"}
    assert seen.state == seen.resumed_state == {("exp_avg", "cuda:0"), ("exp_avg_sq", "cuda:0"), ("step", "cuda:0")}
