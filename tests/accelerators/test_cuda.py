"""Runs on CUDA devices that are not there: nothing in the wrong place, nothing out of order, no more waiting than there was."""

import json

import pytest

RUNS = {
    "single": {"rank": 0, "ranks": 1},
    "fsdp2": {"flags": ["fsdp_enable", "use_ema"], "gradient_accumulation_steps": 2},
    **{f"zero{stage}": {"deepspeed_config": json.dumps({"zero_optimization": {"stage": stage}})} for stage in (1, 2, 3)},
}
IN_EVERY_STEP = {"trainer.train_step": 2}
"""The host asks for the loss, then for the norm of the gradient."""


@pytest.fixture(scope="module")
def seen(request, rehearsed):
    """What was seen of the run of this name; each is rehearsed once."""
    options = dict(RUNS[request.param])
    return rehearsed(*options.pop("flags", ()), **options)


every_run = pytest.mark.parametrize("seen", RUNS, indirect=True)
live = pytest.mark.parametrize("seen", ["single", "fsdp2"], indirect=True)
"""Runs whose saves copy the live tensors; ZeRO's ranks have exchanged theirs in host memory before."""


@every_run
def test_everything_is_on_the_device_of_the_rank(seen):
    [device] = seen.parameters
    assert device.startswith("cuda")
    assert seen.averages <= {device}
    assert seen.state == {("exp_avg", device), ("exp_avg_sq", device), ("step", device)}


@every_run
def test_moments_are_where_they_were_after_resuming(seen):
    assert seen.resumed_state == seen.state


@every_run
def test_streams_wait_for_each_other(seen):
    assert seen.races == []


@every_run
def test_no_thread_turns_to_the_device_of_another_rank(seen):
    assert seen.switches == {}


@live
def test_a_save_pins_what_it_copies_and_no_more_and_keeps_it(seen):
    first, second = seen.phases["save"], seen.phases["save beside a step"]
    assert seen.staged <= sum(first.staging) < 1.1 * seen.staged
    assert len(first.staging) == 1, "each piece is rounded up to a power of two"
    assert second.staging == []


@every_run
@pytest.mark.parametrize("phase", ["second step", "save beside a step", "resume"])
def test_the_host_waits_for_the_device_twice_a_step(seen, phase):
    assert {name: count for name, count in seen.waits(phase).items() if name in IN_EVERY_STEP} == IN_EVERY_STEP


@live
def test_copies_of_a_save_do_not_make_the_loop_wait(seen):
    assert seen.waits("save") == {}
