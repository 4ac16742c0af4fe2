"""Families of diffusers on CUDA devices that are not there: a U-Net; a transformer as an adapter, and with shared tokens."""

import pytest

from accelerators.orderly import Orderly

RUNS = {
    "sdxl": {"family": "sdxl", "flags": ["fsdp_enable", "use_ema"]},
    "flux adapter": {"family": "flux", "flags": ["fsdp_enable"], "model_type": "lora", "lora_rank": 4},
    "flux context": {"family": "flux", "context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"},
}


every_run = pytest.mark.parametrize("seen", RUNS, indirect=True)


@every_run
def test_everything_is_on_the_device_of_the_rank(seen):
    assert seen.parameters == {"cuda:1"}
    assert seen.averages <= {"cuda:1"}
    assert seen.state == seen.resumed_state == {("exp_avg", "cuda:1"), ("exp_avg_sq", "cuda:1"), ("step", "cuda:1")}


@every_run
class TestOrder(Orderly):
    """SDXL lists its blocks in another order than they compute: what is gathered ahead for the last one is not for any."""


@every_run
def test_the_host_waits_for_the_device_twice_a_step(seen):
    """For the loss, then for the norm of the gradient."""
    assert seen.waits("second step") == {"training.trainer.train_step": 2}
