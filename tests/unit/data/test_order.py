"""The order of samples: fair, exact, elastic, and the same for ever."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from smalti.data.buckets import Bucket
from smalti.data.order import LIMIT, Beginning, BucketSamples, Order, Part
from smalti.system.stateless_random import derive_seed, permutation, uniform

settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")


def order_of(sizes: Sequence[Sequence[int]], batch: int, seed: int = 7, version: Literal[1, 2] | None = None) -> Order:
    """One bucket per entry; an entry gives the copies of each of its samples."""
    buckets, start = [], 0
    for number, entry in enumerate(sizes):
        parts = []
        for copies, group in groupby(entry):
            count = len(list(group))
            parts.append(Part(dataset=0, rows=np.arange(count, dtype=np.uint32), copies=copies, offset=start))
            start += count
        buckets.append(BucketSamples(bucket=Bucket(8 * (number + 1), 8), parts=tuple(parts)))
    return Order(buckets, seed=seed, effective_batch=batch, version=version)


def large(count: int, batch: int) -> Order:
    """One bucket of many samples, beside a small one."""
    parts = [
        Part(dataset=0, rows=np.arange(size, dtype=np.uint32), offset=offset) for size, offset in ((count, 0), (500, count))
    ]
    buckets = [BucketSamples(bucket=Bucket(8 * (number + 1), 8), parts=(part,)) for number, part in enumerate(parts)]
    return Order(buckets, seed=42, effective_batch=batch)


def samples_of(order: Order, positions: Sequence[int]) -> list[list[int]]:
    return [order.batch(position).samples.tolist() for position in positions]


contents = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), min_size=1, max_size=4)
orders = st.builds(order_of, contents, st.integers(1, 12), st.integers(0, 2**64), st.sampled_from([1, 2]))


def in_plain_python(sizes: Sequence[Sequence[int]], batch: int, seed: int, positions: int) -> list[list[int]]:
    """Order 1 as it was when the first runs were saved, with lists alone."""
    streams: list[list[int]] = []
    start, needed = 0, positions * batch
    for number, entry in enumerate(sizes):
        common = math.gcd(*entry)
        once = [start + place for place, copies in enumerate(entry) for _ in range(copies // common)]
        start += len(entry)
        keys = (derive_seed("pass", seed, 8 * (number + 1), 8, turn) for turn in range(needed // len(once) + 1))
        streams.append([once[place] for key in keys for place in permutation(len(once), key).tolist()])
    totals, found, epoch = [sum(entry) for entry in sizes], list[list[int]](), 0
    taken = [0] * len(sizes)
    while len(found) < positions:
        counts = [total * (epoch + 1) // batch - total * epoch // batch for total in totals]
        buckets = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
        for turn in permutation(len(buckets), derive_seed("epoch", seed, epoch)).tolist():
            bucket = buckets[turn]
            found.append(streams[bucket][taken[bucket] : taken[bucket] + batch])
            taken[bucket] += batch
        epoch += 1
    return found[:positions]


@given(contents, st.integers(1, 12), st.integers(0, 2**64))
def test_order_1_is_what_it_was_when_the_first_runs_were_saved(sizes: list[list[int]], batch: int, seed: int) -> None:
    order = order_of(sizes, batch, seed)
    count = min(order.epoch_start(3), 40)

    assert order.version == 1
    assert samples_of(order, range(count)) == in_plain_python(sizes, batch, seed, count)


@given(orders, st.integers(1, 4))
def test_after_any_epoch_every_sample_was_seen_as_often_as_it_should_but_for_less_than_a_batch(
    order: Order, epochs: int
) -> None:
    seen = Counter(int(sample) for position in range(order.epoch_start(epochs)) for sample in order.batch(position).samples)

    for content in order.buckets:
        copies = [part.copies for part in content.parts for _ in part.rows]
        missing = [epochs * times - seen[sample] for sample, times in zip(content.samples.tolist(), copies, strict=True)]
        assert min(missing) >= 0
        assert sum(missing) < order.effective_batch


@given(orders, st.data())
def test_a_resumed_run_sees_what_an_uninterrupted_one_would(order: Order, data: st.DataObject) -> None:
    end = order.epoch_start(3)
    whole = samples_of(order, range(end))
    start = data.draw(st.integers(0, end))
    fresh = order.changed_to(version=order.version)

    assert samples_of(fresh, range(start, end)) == whole[start:]


@given(orders)
def test_positions_can_be_asked_for_in_any_order(order: Order) -> None:
    positions = list(range(order.epoch_start(2)))
    expected = samples_of(order, positions)
    random.Random(1).shuffle(positions)
    fresh = order.changed_to(version=order.version)

    assert samples_of(fresh, positions) == [expected[position] for position in positions]


@given(orders)
def test_a_batch_holds_samples_of_its_own_bucket_only(order: Order) -> None:
    members = {content.bucket: set(content.samples.tolist()) for content in order.buckets}

    for position in range(order.epoch_start(2)):
        batch = order.batch(position)
        assert set(batch.samples.tolist()) <= members[batch.bucket]
        assert len(batch.samples) == order.effective_batch


@given(orders)
def test_epochs_are_consecutive_and_differ_by_at_most_one_batch_per_bucket(order: Order) -> None:
    lengths = [order.epoch_start(epoch + 1) - order.epoch_start(epoch) for epoch in range(6)]
    epochs = [order.epoch_of(position) for position in range(order.epoch_start(6))]

    assert max(lengths) - min(lengths) <= len(order.buckets)
    assert epochs == [epoch for epoch, length in enumerate(lengths) for _ in range(length)]


@given(orders)
def test_numbers_are_unique_over_the_run(order: Order) -> None:
    numbers = [number for position in range(order.epoch_start(2)) for number in order.batch(position).numbers]

    assert numbers == list(range(len(numbers)))


@given(contents, st.permutations(range(4)))
def test_the_order_of_the_buckets_given_does_not_matter(sizes: list[list[int]], shuffle: list[int]) -> None:
    order = order_of(sizes, 4)
    buckets = [order.buckets[index] for index in shuffle if index < len(order.buckets)]
    positions = range(order.epoch_start(2))

    assert samples_of(Order(buckets, seed=7, effective_batch=4), positions) == samples_of(order, positions)


@given(contents, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (6, 1), (1, 6), (4, 3), (12, 1)]))
def test_ranks_and_accumulation_cut_the_same_batches_into_pieces(sizes: list[list[int]], layout: tuple[int, int]) -> None:
    order = order_of(sizes, 12)
    ranks, accumulation = layout
    size = 12 // (ranks * accumulation)
    for position in range(order.epoch_start(1)):
        whole = order.batch(position).samples.tolist()
        pieces = [whole[(micro * ranks + rank) * size :][:size] for micro in range(accumulation) for rank in range(ranks)]
        assert [sample for piece in pieces for sample in piece] == whole


def test_another_seed_gives_another_order() -> None:
    sizes = [[1] * 50]

    assert samples_of(order_of(sizes, 10, seed=1), range(5)) != samples_of(order_of(sizes, 10, seed=2), range(5))


def test_epochs_are_shuffled_anew() -> None:
    order = order_of([[1] * 50], 10)

    assert samples_of(order, range(5)) != samples_of(order, range(5, 10))


def test_batches_of_all_buckets_are_mixed() -> None:
    order = order_of([[1] * 100, [1] * 100], 10)
    first = [order.batch(position).bucket for position in range(10)]

    assert len(set(first)) == 2


def test_copies_of_a_repeated_picture_lie_apart() -> None:
    order = order_of([[100] * 20], 20)

    assert all(len(set(batch)) == 20 for batch in samples_of(order, range(20)))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(1, 30))
def test_weighted_samples_are_seen_in_proportion(some: int, others: int, one: int, other: int, batch: int, epochs: int) -> None:
    """At any epoch's end each sample of a part was seen as often as its fraction says, but for less than a batch and a pass."""
    parts = [
        Part(dataset=0, rows=np.arange(some, dtype=np.uint32), copies=Fraction(one, 6)),
        Part(dataset=1, rows=np.arange(others, dtype=np.uint32), copies=Fraction(other, 6), offset=some),
    ]
    order = Order([BucketSamples(bucket=Bucket(8, 8), parts=tuple(parts))], seed=3, effective_batch=batch)
    end = order.epoch_start(epochs)
    seen = Counter(sample for samples in samples_of(order, range(end)) for sample in samples)
    total = Fraction(some * one + others * other, 6)
    times = one // math.gcd(one, other)
    passes = end * batch // (some * times + others * (other // math.gcd(one, other)))

    assert end == math.floor(epochs * total / batch)
    assert all(passes * times <= seen[sample] <= (passes + 1) * times for sample in range(some))
    assert [order.epoch_of(position) for position in range(end)] == [
        epoch for epoch in range(epochs) for _ in range(order.epoch_start(epoch + 1) - order.epoch_start(epoch))
    ]


def test_the_order_is_what_it_always_was() -> None:
    """Frozen values: if they change, no run can be resumed over the change."""
    order = order_of([[1] * 5, [2, 1, 1]], 3, seed=42)

    assert samples_of(order, range(6)) == [[2, 1, 4], [5, 7, 5], [0, 3, 3], [6, 5, 6], [1, 2, 4], [0, 2, 4]]


def test_order_2_is_what_it_always_was() -> None:
    """Frozen values, likewise: of a computed pass, a stored one, and batches that reach over the end of a pass."""
    order = large(LIMIT + 100, 64)
    found = [order.batch(position) for position in (0, 1, 500, 10_000)]

    assert order.version == 2
    assert [(batch.first, batch.samples[:4].tolist()) for batch in found] == [
        (0, [34554, 44066, 64126, 32965]),
        (64, [45459, 64918, 43764, 34045]),
        (31_744, [18542, 15, 23532, 53013]),
        (635_136, [9333, 55325, 43837, 47252]),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_only_order_2_keeps_a_sample_from_being_twice_in_a_batch(version: Literal[1, 2]) -> None:
    order = order_of([[1] * 25, [1] * 24, [1] * 31], 12, version=version)
    found = samples_of(order, range(order.epoch_start(60)))

    assert all(len(set(batch)) == 12 for batch in found) == (version == 2)


@given(st.integers(2, 9), st.integers(0, 20), st.integers(0, 2**64))
def test_no_batch_of_order_2_holds_a_sample_twice(batch: int, more: int, seed: int) -> None:
    order = order_of([[1] * (2 * batch + more)], batch, seed, version=2)
    count = 12 * (2 * batch + more)
    stream = [sample for samples in samples_of(order, range(order.epoch_start(12))) for sample in samples]

    assert all(len(set(stream[start : start + batch])) == batch for start in range(0, len(stream), batch))
    size = 2 * batch + more
    passes = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    assert all(sorted(one) == list(range(size)) for one in passes)  # still each sample once in every pass
    assert count >= len(stream)


def test_batches_of_a_large_epoch_are_computed_and_complete() -> None:
    """An epoch of more than `LIMIT` batches: each sample once, and no batch is repeated."""
    order = large(LIMIT + 3000, 1)
    found = np.concatenate([order.batch(position).samples for position in range(0, order.epoch_start(1), 37)])
    firsts = {
        (batch.bucket, batch.first) for batch in map(order.batch, range(order.epoch_start(1) - 500, order.epoch_start(1) + 500))
    }

    assert (order.version, len(np.unique(found))) == (2, len(found))
    assert len(firsts) == 1000


def test_a_run_of_order_1_keeps_it_whatever_its_size() -> None:
    order = large(LIMIT + 100, 64)
    older = order.changed_to(version=1)
    key = derive_seed("pass", 42, 8, 8, 0)
    first = next(batch for batch in map(older.batch, range(1100)) if batch.bucket == Bucket(8, 8) and batch.first == 0)

    assert (order.version, older.version) == (2, 1)
    assert first.samples.tolist() == permutation(LIMIT + 100, key)[:64].tolist()


@given(orders, st.integers(0, 50), st.integers(0, 3))
def test_an_order_that_begins_later_is_the_same_from_there(order: Order, position: int, epoch: int) -> None:
    assume(order.epoch_start(epoch + 2) > order.epoch_start(epoch))
    later = order.changed_to(version=order.version, beginning=Beginning(position=position, epoch=epoch))
    start, end = order.epoch_start(epoch), order.epoch_start(epoch + 2)

    assert later.epoch_start(epoch) == position
    assert samples_of(later, range(position, position + end - start)) == samples_of(order, range(start, end))
    assert [later.epoch_of(position + place) for place in range(end - start)] == [
        order.epoch_of(start + place) for place in range(end - start)
    ]
    assert later.batch(position).numbers[0] == position * order.effective_batch
    with pytest.raises(ValueError, match="from the beginning of the order"):
        later.epoch_of(position - 1)


def test_a_million_samples_cost_little() -> None:
    order = order_of([[1] * 600_000, [1] * 400_000], 512)
    last = order.epoch_start(3) - 1

    assert order.epoch_of(last) == 2
    assert len(set(order.batch(last).samples.tolist())) == 512


def test_stand_ins_follow_in_the_stream_and_name_every_sample_of_the_bucket() -> None:
    order = order_of([[1] * 10, [1] * 30], 4)
    batch = next(batch for batch in map(order.batch, range(10)) if batch.bucket == Bucket(16, 8))
    found = list(order.replacements(batch, 1))

    assert found[:2] == batch.samples[2:].tolist()
    assert set(found) == set(range(10, 40))


def test_positions_count_from_zero() -> None:
    with pytest.raises(ValueError, match="from 0"):
        order_of([[1]], 1).batch(-1)


@given(st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_a_permutation_names_every_number_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key).tolist()) == list(range(size))


@given(st.integers(0, 60), st.integers(0, 2**64 - 1))
@example(70_000, 5)  # many hashes begin with the same 16 bits
def test_a_permutation_is_the_order_of_splitmix_hashes(size: int, key: int) -> None:
    """The same in plain Python, so that neither numpy's version nor its overflow rules can matter."""
    word = 2**64 - 1

    def splitmix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & word
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & word
        return state ^ (state >> 31)

    hashes = [splitmix(key + 0x9E3779B97F4A7C15 * (number + 1) & word) for number in range(size)]

    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published generator's first output for seed 0
    assert permutation(size, key).tolist() == sorted(range(size), key=hashes.__getitem__)


def test_permutations_are_fair() -> None:
    """Each of 6 numbers comes first in a sixth of 6000 permutations, within five standard deviations."""
    first = Counter(int(permutation(6, derive_seed("fair", number))[0]) for number in range(6000))

    assert all(abs(first[number] - 1000) < 5 * (6000 * 5 / 36) ** 0.5 for number in range(6))


def test_fractions_fill_the_unit_interval_evenly() -> None:
    tenths = Counter(int(10 * uniform(derive_seed("even", number))) for number in range(10_000))

    assert sorted(tenths) == list(range(10))
    assert max(abs(count - 1000) for count in tenths.values()) < 150


def test_keys_depend_on_the_order_of_their_words() -> None:
    assert derive_seed("a", 1, 2) != derive_seed("a", 2, 1)
