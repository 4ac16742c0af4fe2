"""Closed formulas: what is exact is exact, what is kept is kept, and more sharding never takes more memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from smalti import FrozenStorage, World
from smalti.errors import UserError
from smalti_plan.choices import choices, estimate, micro_batches
from support.planned import H100, MODEL, MODES, RUN, WHOLE, sharded


def counted(strategy, recompute="none", micro=1, ranks=8, run=RUN, model=MODEL):
    return estimate(model, run, strategy, recompute, micro, H100, World(size=ranks, local_size=8, device="cuda:0"))


def test_what_stays_between_steps_is_exact():
    kept = counted(WHOLE).counted.resident
    assert (kept.parameters, kept.optimizer, kept.gradients) == (4 * MODEL.trained, 8 * MODEL.trained, 0)
    assert counted(sharded(8)).counted.resident.total == kept.total // 8


def test_rows_and_columns_count_as_state():
    model, run = replace(MODEL, factors=1000, flattened_factors=300), replace(RUN, state_bytes=4.0, factors=2)
    one = World(size=1, local_size=1, device="cuda:0")
    for flattened, count in ((False, 1000), (True, 300)):
        kept = estimate(model, replace(run, factors_flattened=flattened), WHOLE, "none", 1, H100, one).counted.resident
        assert kept.optimizer == pytest.approx(4 * MODEL.trained + 4 * 2 * count, abs=1)


def test_frozen_blocks_in_8_bits_are_gathered_and_sent_as_they_are_kept():
    """The gathered copies, and what ranks send of all parameters, take half: adapters and what is in no block do not."""
    adapter = 2**20
    blocks = tuple(replace(block, trained=adapter) for block in MODEL.sample.blocks)
    frozen = 2**32 - 16 * adapter
    model = replace(MODEL, trained=16 * adapter, outside_trained=0, sample=replace(MODEL.sample, blocks=blocks))
    strategy = replace(sharded(8), gathered=3, gathered_bytes=2)

    def found(bytes_in_block):
        kept = replace(model, frozen=FrozenStorage(bytes=frozen * bytes_in_block + 2 * MODEL.outside))
        way = estimate(kept, RUN, strategy, "full", 1, H100, World(size=8, local_size=8, device="cuda:0"))
        return way.counted.phases["forward"].device.gathered, way.counted.traffic[0].bytes, way.slowest.parts["communication"]

    (whole, sent, seconds), (half, less_sent, less_seconds) = found(2), found(1)
    assert whole == 2 * (3 * 2**28 + MODEL.outside)
    assert whole - half == 3 * (2**28 - adapter)
    assert sent - less_sent == 2 * 4 * frozen / 2
    assert less_seconds < seconds


def test_a_save_copies_the_average_that_an_optimizer_keeps():
    ways = [counted(WHOLE, run=replace(RUN, averages=averages)).counted for averages in (False, True)]
    plain, averaging = (way.phases["save"] for way in ways)
    assert averaging.pinned - plain.pinned == 4 * MODEL.trained // 8
    assert averaging.device.total - plain.device.total == 4 * MODEL.trained
    assert ways[0].resident == ways[1].resident


def test_gradients_in_host_memory_may_be_added_up_on_the_device_before():
    kept = replace(sharded(8), offloaded=frozenset(("state", "gradients")))
    for micro in (1, 2):  # two micro-batches a step, and one
        plain, summing = (counted(way, "full", micro=micro).counted for way in (kept, replace(kept, summed_bytes=4)))
        for phase in ("backward", "step"):
            more = summing.phases[phase].device.total - plain.phases[phase].device.total
            assert more == 4 * MODEL.trained // 8
        more = summing.phases["forward"].device.total - plain.phases["forward"].device.total
        assert more == (4 * MODEL.trained // 8 if micro == 1 else 0)
        assert summing.resident == plain.resident
        assert summing.resident_host == plain.resident_host


def test_one_rank_with_one_backward_pass_adds_up_no_gradients():
    one, kept = World(size=1, local_size=1, device="cuda:0"), replace(sharded(1), offloaded=frozenset(("state", "gradients")))
    run = replace(RUN, effective_batch=2)
    for micro, sums in ((2, 0), (1, 4 * MODEL.trained)):
        ways = (estimate(MODEL, run, replace(kept, summed_bytes=each), "full", micro, H100, one).counted for each in (0, 4))
        plain, summing = (each.phases["step"].device.total for each in ways)
        assert summing - plain == sums


def test_gradients_count_between_steps_where_their_memory_is_kept():
    once = replace(RUN, effective_batch=8)
    kept, freed = (counted(replace(WHOLE, keeps_gradients=kept), run=once).counted for kept in (True, False))
    assert kept.resident.total - freed.resident.total == 4 * MODEL.trained
    assert kept.phases["forward"].device.total - freed.phases["forward"].device.total == 4 * MODEL.trained


def test_terms_keep_what_their_backward_passes_need_and_turns_add_up_gradients():
    """Forward passes that have no backward pass keep nothing; a second turn needs the gradients of the first."""
    once, freed = replace(RUN, effective_batch=8), replace(WHOLE, keeps_gradients=False)

    def forward(mode="none", **terms):
        model = replace(MODEL, sample=replace(MODEL.sample, **terms))
        return counted(freed, mode, run=once, model=model).counted.phases["forward"].device

    for mode in MODES:
        assert forward(mode, trained_passes=3).activations == 3 * forward(mode).activations > 0
    assert forward(other_passes=2) == forward()
    assert forward(turns=2) == replace(forward(), gradients=4 * MODEL.trained)


def test_ema_counts_where_it_is_kept():
    on_device, on_host = (counted(WHOLE, run=replace(RUN, ema=True, ema_on_device=device)).counted for device in (True, False))
    assert on_device.resident.total - on_host.resident.total == 4 * MODEL.trained
    assert on_host.resident_host - on_device.resident_host == 4 * MODEL.trained


def test_activations_that_wait_in_host_memory_count_there():
    on_host = replace(RUN, activations_on_host=True)
    there, here = (counted(WHOLE, "full", run=run).counted.phases["forward"] for run in (on_host, RUN))
    assert there.device.activations < here.device.activations
    assert there.host - here.host == here.device.activations - there.device.activations
    assert counted(WHOLE, run=on_host).counted == counted(WHOLE).counted, "only what recomputation keeps"


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
    assert [each.fit.level for each in found] == sorted((each.fit.level for each in found), key=order.index)
    fitting = [each.seconds for each in found if each.fit.level == "fits"]
    assert fitting == sorted(fitting)
    assert len(fitting) > 1


def test_frozen_weights_that_are_kept_in_less_are_offered_where_nothing_fits_and_the_strategy_divides_nothing():
    frozen = FrozenStorage(bytes=100 * 2**30)
    small = FrozenStorage(options={"kept": "small"}, bytes=2**30, restoring=2**28)
    model = replace(MODEL, frozen=frozen, smaller=(small,))
    one = World(size=1, local_size=1, device="cuda:0")
    strategies = [replace(WHOLE, offloaded=frozenset(("state", "gradients"))), replace(sharded(1), name="one shard")]

    def offered(memory):
        device = replace(H100, memory=int(memory * 2**30))
        found = choices(model, replace(RUN, effective_batch=1), strategies, device, one)
        return {each.strategy.name: each for each in found if each.candidate.recompute == "full"}

    found = offered(60)
    assert set(found) == {"whole", "one shard", "whole-small"}
    assert found["whole-small"].options["kept"] == "small"
    assert found["whole"].counted.peak.total - found["whole-small"].counted.peak.total == 99 * 2**30 - 2**28
    assert set(offered(500)) == {"whole", "one shard"}, "what fits needs none"


def test_a_model_that_cannot_be_sharded_has_no_strategy_that_divides_it():
    found = choices(replace(MODEL, indivisible=True), RUN, [WHOLE, sharded(8)], H100, World(size=8, local_size=8))
    assert {each.strategy.name for each in found} == {"whole"}


def test_ranks_share_a_save_whoever_holds_copies():
    saved = [counted(strategy).counted.save_bytes for strategy in (WHOLE, sharded(8))]
    assert saved == [12 * MODEL.trained // 8] * 2


def test_released_gradients_are_those_of_one_block_and_weights_in_bf16_take_half():
    run = replace(RUN, effective_batch=1)
    more = ({}, {"releases_gradients": True}, {"bf16_weights": True})
    plain, released, halved = (counted(WHOLE, ranks=1, run=replace(run, **each)).counted for each in more)
    largest = max(MODEL.largest, *(block.parameters for block in MODEL.sample.blocks))
    freed = plain.phases["step"].device.total - released.phases["step"].device.total
    assert freed == 4 * (MODEL.trained - largest)
    assert (halved.resident.parameters, halved.resident.optimizer) == (2 * MODEL.trained, 8 * MODEL.trained)
    assert halved.save_bytes == 10 * MODEL.trained


def test_only_ways_that_can_release_gradients_are_offered():
    others = [replace(WHOLE, name="ddp", keeps_gradients=True), replace(WHOLE, name="zero", options={"deepspeed_config": "{}"})]
    run = replace(RUN, effective_batch=8, releases_gradients=True)
    found = choices(MODEL, run, [WHOLE, *others], H100, World(size=1, local_size=1, device="cuda:0"))
    assert {(each.strategy.name, each.candidate.accumulation) for each in found} == {("whole", 1)}
