"""Frozen weights and activations that come from host memory, on a CUDA device that is not there: in order, without waiting."""

import pytest

from accelerators.orderly import Orderly
from support.whole import only_whole, some

RUNS = {
    "flux": {
        "family": "flux",
        "rank": 0,
        "ranks": 1,
        "flags": ["stream_base", "gradient_checkpointing"],
        "model_type": "lora",
        "lora_rank": 4,
        "gradient_accumulation_steps": 2,
    },
}
RUNS["flux, int8"] = RUNS["flux"] | {"base_model_precision": "int8-rowwise"}
RUNS["flux, paged"] = {**RUNS["flux"], "pinned_gib": 0}
RESIDENT = {**RUNS["flux"], "flags": ["gradient_checkpointing"]}
SHARDED = {**RUNS["flux"], "rank": 1, "ranks": 4, "flags": ["stream_base", "gradient_checkpointing", "fsdp_enable"]}
RUNS |= {"fsdp2": SHARDED, "fsdp2, int8": SHARDED | {"base_model_precision": "int8-rowwise"}}
RUNS["fsdp2, paged"] = {**SHARDED, "pinned_gib": 0}
BLOCKS, SLOTS, MICRO_BATCHES = 4, 2, 2
WIDE = {"toy_width": 64, "resolution": 64, "train_batch_size": 2, "gradient_accumulation_steps": 2, "saves": False}
"""The least whose activations are worth a copy."""
RUNS |= {
    "activations": {"rank": 0, "ranks": 1, "flags": ["offload_activations", "gradient_checkpointing"], **WIDE},
    "fsdp2, activations": {"flags": ["offload_activations", "fsdp_enable", "fsdp_activation_checkpointing"], **WIDE},
}

NOT_PAGED = [name for name in RUNS if "paged" not in name]
KEPT = ("flux, paged", "fsdp2", "fsdp2, activations")
every_run = pytest.mark.parametrize("seen", some(RUNS, *KEPT), indirect=True)
streamed = pytest.mark.parametrize("seen", some(["flux", "flux, paged", "fsdp2"], "flux, paged", "fsdp2"), indirect=True)


@every_run
class TestOrder(Orderly):
    """A block computes when it has arrived; another takes its place when the last product with it was computed."""


@pytest.mark.parametrize("seen", some(NOT_PAGED, "fsdp2", "fsdp2, activations"), indirect=True)
def test_the_host_waits_for_the_device_as_often_as_without_it(seen):
    assert seen.waits("third step") == {}


@pytest.mark.parametrize("seen", some(["flux, paged", "fsdp2, paged"], "flux, paged"), indirect=True)
def test_for_pages_the_host_waits_until_the_pinned_memory_before_them_was_copied(seen):
    assert set(seen.waits("third step")) == {"SYNC_EVENT"}


@streamed
def test_what_trains_is_on_the_device_and_what_is_streamed_is_not(seen, request):
    device = f"cuda:{RUNS[request.node.callspec.params['seen']]['rank']}"
    assert seen.parameters == {device, "cpu"}
    assert seen.state == seen.resumed_state == {(name, device) for name in ("exp_avg", "exp_avg_sq", "step")}


@pytest.mark.parametrize("seen", some(["activations", "fsdp2, activations"], "fsdp2, activations"), indirect=True)
def test_activations_are_copied_to_the_host_and_back(seen):
    assert seen.phases["second step"].copies["activations.ActivationOffload._copy"] >= 2 * 2


@only_whole("plugins/memory/tests/test_streaming.py::test_a_step_copies_each_block_twice_less_what_is_there_at_the_turns")
@pytest.mark.parametrize("seen", ["flux"], indirect=True)
def test_a_step_has_hardly_more_kernels_and_as_few_copies_as_there_can_be(seen, rehearsed, pipeline):
    options = RESIDENT | {"saves": False, "samples": False} | pipeline("flux")
    resident = rehearsed(*options.pop("flags"), **{name: value for name, value in options.items() if name != "family"})
    step = seen.phases["second step"]
    copies = step.copies["streaming.BlockStream._fetch"]
    assert copies == MICRO_BATCHES * 2 * (BLOCKS - SLOTS)
    assert step.kernels - copies <= 1.02 * resident.phases["second step"].kernels


@pytest.mark.parametrize("seen", ["fsdp2"], indirect=True)
def test_shards_take_no_memory_of_the_device_and_come_as_one_copy_for_each_gather(seen, rehearsed, pipeline):
    options = SHARDED | {"saves": False, "flags": ["gradient_checkpointing", "fsdp_enable"]} | pipeline("flux")
    resident = rehearsed(*options.pop("flags"), **{name: value for name, value in options.items() if name != "family"})
    step = seen.phases["second step"]
    copies = step.copies["host_shards.HostShards.fetch"]
    assert copies == MICRO_BATCHES * (2 * BLOCKS - 1), "the last block stays gathered for the backward pass"
    assert step.kernels - copies <= 1.02 * resident.phases["second step"].kernels
    assert resident.held[-1] - seen.held[-1] >= seen.built[1] > 0
