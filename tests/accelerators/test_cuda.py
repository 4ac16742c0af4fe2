"""Runs on CUDA devices that are not there: nothing in the wrong place, nothing out of order, no more waiting than there was."""

import json

import pytest

from accelerators.orderly import Orderly
from support.whole import some

RUNS = {
    "single": {"rank": 0, "ranks": 1},
    "single, checked": {"rank": 0, "ranks": 1, "flags": ["check_before_step"]},
    "fsdp2": {"flags": ["fsdp_enable", "use_ema"], "gradient_accumulation_steps": 2},
    "offload": {
        "flags": ["fsdp_enable", "fsdp_cpu_offload", "use_ema"],
        "gradient_accumulation_steps": 2,
        "ema_device": "cpu",
        "toy_width": 288,
    },
    "hsdp": {
        "flags": ["fsdp_enable", "fsdp_cpu_ram_efficient_loading"],
        "ranks": 16,
        "fsdp_shard_size": 8,
        "gradient_accumulation_steps": 2,
    },
    "average on the host": {"rank": 0, "ranks": 1, "flags": ["use_ema"], "ema_device": "cpu"},
    "fsdp2, average on the host": {"flags": ["fsdp_enable", "use_ema"], "ema_device": "cpu"},
    "fsdp2, 8 bits": {"flags": ["fsdp_enable"], "optimizer": "adamw8bit"},
    "fsdp2, came": {"flags": ["fsdp_enable"], "optimizer": "came"},
    "fsdp2, stableadamw": {"flags": ["fsdp_enable"], "optimizer": "stableadamw"},
    "lion": {"rank": 0, "ranks": 1, "optimizer": "lion"},
    "prodigy": {"rank": 0, "ranks": 1, "optimizer": "prodigy"},
    **{f"zero{stage}": {"deepspeed_config": json.dumps({"zero_optimization": {"stage": stage}})} for stage in (1, 2, 3)},
}
LOSS_AND_NORM = {"training.run.Run.check": 2}
WAITS = {
    "single": {},
    "fsdp2": {},
    "hsdp": {},
    "average on the host": {},
    "fsdp2, average on the host": {},
    "single, checked": LOSS_AND_NORM,
    "offload": {
        "training.run.Run.check": 1,
        "": 31,
    },  # torch adds up on the host what the second micro-batch gives, tensor by tensor
    "fsdp2, 8 bits": LOSS_AND_NORM,
    "fsdp2, came": LOSS_AND_NORM,
    "fsdp2, stableadamw": LOSS_AND_NORM,
    "lion": LOSS_AND_NORM,
    "prodigy": LOSS_AND_NORM | {"prodigy.Prodigy.step": 1},  # the estimate
    "zero1": LOSS_AND_NORM | {"zero.Stages1And2.norm": 2, "zero.Stages1And2.step": 2},
    "zero2": LOSS_AND_NORM | {"zero.Stages1And2.norm": 2, "zero.Stages1And2.step": 2},
    "zero3": LOSS_AND_NORM | {"zero.Stage3.norm": 2, "zero.Stage3._step": 1, "SYNC_STREAM": 1, "SYNC_DEVICE": 1},
}


KEPT = ("single", "fsdp2", "offload", "hsdp", "zero3")
"""Each strategy and place of the average; ZeRO asks the host whether to step."""
every_run = pytest.mark.parametrize("seen", some(RUNS, *KEPT), indirect=True)
trained = pytest.mark.parametrize("seen", ["single", "fsdp2", "hsdp"], indirect=True)
"""Runs whose saves copy the live tensors; ZeRO's ranks have exchanged theirs in host memory before."""


def kept(run: dict) -> set[str]:
    """The names of the optimizer's state."""
    others = {
        "adamw8bit": {"step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"},
        "came": {"exp_avg", "row_var", "col_var", "row_res", "col_res", "variance"},
        "lion": {"step", "exp_avg"},
        "prodigy": {"exp_avg", "exp_avg_sq", "s", "p0"},
    }
    return others.get(run.get("optimizer", ""), {"step", "exp_avg", "exp_avg_sq"})


@every_run
def test_everything_is_in_one_place(seen, request):
    [device], run = seen.parameters, RUNS[request.node.callspec.params["seen"]]
    assert seen.averages <= {run.get("ema_device", device)}
    assert seen.state == {(key, "cpu" if key == "step" and "optimizer" in run else device) for key in kept(run)}


@every_run
def test_moments_are_where_they_were_after_resuming(seen):
    assert seen.resumed_state == seen.state


@every_run
class TestOrder(Orderly):
    """Of all of them."""


@trained
def test_a_save_pins_what_it_copies_and_no_more_and_keeps_it(seen):
    first, second = seen.phases["save"], seen.phases["save beside a step"]
    assert seen.staged <= sum(first.staging) < 1.1 * seen.staged
    assert len(first.staging) == 1, "each piece is rounded up to a power of two"
    assert second.staging == []


@every_run
def test_the_host_waits_for_the_device_no_more_often_than_it_must(seen, request):
    """In a step with its micro-batches, by function: a number that may not grow."""
    assert seen.waits("third step") == WAITS[request.node.callspec.params["seen"]]


@pytest.mark.parametrize("seen", ["fsdp2", "offload", "hsdp"], indirect=True)
def test_a_sharded_rank_never_holds_the_whole_gradient(seen):
    """Beside it, each micro-batch leaves the loss of each of its samples until the step ends."""
    first, last = seen.held[:2]
    assert 0 <= last - first <= 64, "bytes after the first micro-batch, and after the last one"


@pytest.mark.parametrize("seen", ["offload"], indirect=True)
def test_shards_in_host_memory_pin_what_they_need_and_no_more(seen):
    pinned, weights = seen.built
    assert 0 < weights <= pinned <= 1.01 * weights


OFFLOADED = {
    "came": {"optimizer": "came"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "bf16": {"weights_dtype": "bf16", "max_grad_norm": 0},
}


@pytest.mark.parametrize("name", some(OFFLOADED, "bf16"))
def test_state_is_with_the_shards_in_host_memory(rehearsed, name):
    seen = rehearsed("fsdp_enable", "fsdp_cpu_offload", samples=False, **OFFLOADED[name])
    assert {device for _, device in seen.state} == {device for _, device in seen.resumed_state} == {"cpu"}


def test_no_more_is_pinned_than_may_be(rehearsed):
    pinned, weights = rehearsed("fsdp_enable", "fsdp_cpu_offload", pinned_gib=0, saves=False, samples=False).built
    assert pinned < 64 < weights, "a number at most"


@pytest.mark.parametrize("seen", ["hsdp"], indirect=True)
def test_first_weights_travel_in_host_memory(seen):
    """Each pair of ranks would make a communicator for devices; those that are made with a group serve all of it."""
    assert set(seen.messages) == {"cpu"}


@pytest.mark.parametrize("seen", ["hsdp"], indirect=True)
def test_groups_of_ranks_that_share_a_copy_have_no_second_line(seen):
    assert [group["backend"] for group in seen.groups if group.get("group_desc")] == ["nccl"] * (2 + 8)


@trained
def test_copies_of_a_save_do_not_make_the_loop_wait(seen):
    assert seen.waits("save") == {}


def test_a_run_in_fp32_multiplies_in_tf32_forward_and_backward(rehearsed):
    seen = rehearsed("gradient_checkpointing", rank=0, ranks=1, mixed_precision="no")
    assert {name: set(seen.phases[name].tf32) for name in ("second step", "sample")} == {
        "second step": {True},
        "sample": {True},
    }
