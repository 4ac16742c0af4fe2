"""Closed formulas: what is exact is exact, what is kept is kept, and more sharding never takes more memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from smalti import Communication, Strategy, World
from smalti.errors import UserError
from smalti.parallel import device_models
from smalti.planning import ModelFacts, RunFacts, choices
from smalti.planning.choices import estimate, micro_batches
from smalti.planning.facts import BlockFacts, SampleFacts

H100 = device_models()["h100-80g"]
BLOCK = BlockFacts(path="", parameters=2**28, trained=2**28, saved=2**29, inputs=2**24, copied=2**29, products=2**27)
MODEL = ModelFacts(
    family="made up",
    parameters=2**32 + 2**20,
    trained=2**32 + 2**20,
    frozen_bytes=0,
    buffers=0,
    largest=2**24,
    outside=2**20,
    outside_trained=2**20,
    sample=SampleFacts(
        width=1024,
        height=1024,
        flops=10**13,
        saved=2**22,
        copied=2**21,
        operations=1000,
        blocks=tuple(replace(BLOCK, path=f"blocks.{number}") for number in range(16)),
    ),
)
RUN = RunFacts(state_bytes=8, ema=False, ema_on_device=False, products="bf16", effective_batch=16, ranks=8)
MODES = {mode: {} for mode in ("none", "selective", "full")}
WHOLE = Strategy(name="whole", title="whole", options={}, recompute=MODES)


def sharded(ranks):
    sent = Communication(collective="all-gather", bytes_per_parameter=4.0, ranks=ranks)
    divided = {"weights": ranks, "gradients": ranks, "state": ranks}
    return Strategy(
        name="sharded", title="sharded", options={}, recompute=MODES, divided=divided, own_copies=True, communication=(sent,)
    )


def counted(strategy, recompute="none", micro=1, ranks=8, run=RUN):
    return estimate(MODEL, run, strategy, recompute, micro, H100, World(size=ranks, local_size=8, device="cuda:0"))


def test_what_stays_between_steps_is_exact():
    kept = counted(WHOLE).counted.resident
    assert (kept.parameters, kept.optimizer, kept.gradients) == (4 * MODEL.trained, 8 * MODEL.trained, 0)
    assert counted(sharded(8)).counted.resident.total == kept.total // 8


def test_ema_counts_where_it_is_kept():
    on_device, on_host = (counted(WHOLE, run=replace(RUN, ema=True, ema_on_device=device)).counted for device in (True, False))
    assert on_device.resident.total - on_host.resident.total == 4 * MODEL.trained
    assert on_host.resident_host - on_device.resident_host == 4 * MODEL.trained


def test_recomputation_trades_memory_for_time():
    found = [counted(sharded(8), mode) for mode in ("none", "selective", "full")]
    peaks, seconds = [each.counted.peak.total for each in found], [each.seconds for each in found]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert len(set(peaks)) == len(set(seconds)) == 3


def test_offloaded_state_is_in_host_memory_and_costs_time():
    offloaded = replace(sharded(8), offloaded=frozenset(("state", "gradients")))
    here, there = counted(sharded(8)), counted(offloaded)
    assert there.counted.resident.optimizer == 0
    assert there.counted.resident_host >= 8 * MODEL.trained // 8
    assert there.seconds > here.seconds


def test_traffic_between_nodes_is_slower_than_within_one():
    within = sharded(16)
    between = replace(within, communication=tuple(replace(each, between_nodes=True) for each in within.communication))
    assert counted(between, ranks=16).seconds > counted(within, ranks=16).seconds


@settings(max_examples=40, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4, 8]), micro=st.sampled_from([1, 2]), mode=st.sampled_from(sorted(MODES)))
def test_more_ranks_never_take_more_memory_each(ranks, micro, mode):
    fewer, more = (counted(sharded(size), mode, micro).counted.peak.total for size in (ranks, 2 * ranks))
    assert more <= fewer


@settings(max_examples=60, deadline=None)
@given(effective=st.integers(1, 512), ranks=st.integers(1, 64))
def test_every_way_keeps_the_effective_batch(effective, ranks):
    run, world = replace(RUN, effective_batch=effective), World(size=ranks, local_size=ranks, device="cuda:0")
    if effective % ranks:
        with pytest.raises(UserError, match=f"effective batch of {effective} cannot be divided over {ranks} ranks"):
            choices(MODEL, run, [WHOLE], H100, world)
        return
    found = choices(MODEL, run, [WHOLE], H100, world)
    assert {each.candidate.micro_batch * each.candidate.accumulation * ranks for each in found} == {effective}
    assert {each.candidate.micro_batch for each in found} == set(micro_batches(effective, ranks))


def test_ways_that_fit_come_first_and_the_fastest_of_them_first():
    found = choices(MODEL, RUN, [WHOLE, sharded(8)], H100, World(size=8, local_size=8, device="cuda:0"))
    order = ["fits", "tight", "does not fit"]
    assert [each.verdict.fit for each in found] == sorted((each.verdict.fit for each in found), key=order.index)
    fitting = [each.seconds for each in found if each.verdict.fit == "fits"]
    assert fitting == sorted(fitting)
    assert len(fitting) > 1
