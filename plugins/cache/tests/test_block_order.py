"""The order of blocks: complete, exact and mixed like any other, and with blocks that one rank reads at once."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from smalti.config.resolution import resolve
from smalti.data import scan_data
from smalti.data.buckets import Bucket
from smalti.data.order import Beginning, BucketSamples, Order, Part
from smalti.data.plan.scheduled_order import ScheduledOrder, Span
from smalti.data.scan.identity import Identity
from smalti.errors import CheckpointError
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.system import permutation
from smalti.training.resume_checks import Resumption, check_resumable
from smalti_cache.block_order import BlockOrder

settings.register_profile("few", deadline=None, max_examples=40)
settings.load_profile("few")

parts_of = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=3)
passes_of = st.builds(BlockOrder, st.integers(2, 9), st.integers(1, 3))


def order_of(buckets, batch, passes, seed=7, version=None, kind=Order, **more):
    """One bucket per entry, which has the rows and copies of its parts."""
    found, start = [], 0
    for number, entry in enumerate(buckets):
        parts = []
        for dataset, (rows, copies) in enumerate(entry):
            parts.append(Part(dataset=dataset, rows=np.arange(rows, dtype=np.uint32), copies=copies, offset=start))
            start += rows
        found.append(BucketSamples(bucket=Bucket(8 * (number + 1), 8), parts=tuple(parts)))
    return kind(found, seed=seed, effective_batch=batch, version=version, passes=passes, **more)


orders = st.builds(
    order_of,
    st.lists(parts_of, min_size=1, max_size=2),
    st.integers(1, 12),
    passes_of,
    st.integers(0, 2**64),
    st.sampled_from([1, 2]),
)


def samples_of(order, positions):
    return [order.batch(position).samples.tolist() for position in positions]


@given(parts_of, st.integers(1, 30), st.integers(0, 2**64 - 1), passes_of, st.data())
def test_a_pass_is_a_permutation_that_can_be_asked_for_in_pieces(parts, batch, key, passes, data):
    total = sum(rows * copies for rows, copies in parts)
    places = passes(parts, batch, key)(np.arange(total))
    some = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=20)), dtype=np.int64)

    assert sorted(places.tolist()) == list(range(total))
    assert passes(parts, batch, key)(some).tolist() == places[some].tolist()


@given(orders, st.integers(1, 4))
def test_after_any_epoch_every_sample_was_seen_as_often_as_it_should_but_for_less_than_a_batch(order, epochs):
    seen = Counter(sample for batch in samples_of(order, range(order.epoch_start(epochs))) for sample in batch)
    for content in order.buckets:
        copies = [part.copies for part in content.parts for _ in part.rows]
        missing = [epochs * times - seen[sample] for sample, times in zip(content.samples.tolist(), copies, strict=True)]
        assert min(missing) >= 0
        assert sum(missing) < order.effective_batch


@given(orders, st.data())
def test_a_resumed_run_sees_what_an_uninterrupted_one_would(order, data):
    whole = samples_of(order, range(order.epoch_start(2)))
    start = data.draw(st.integers(0, len(whole)))
    fresh = order.changed_to(version=order.version)

    assert samples_of(fresh, range(start, len(whole))) == whole[start:]


@given(orders, st.integers(0, 50), st.integers(0, 2))
def test_an_order_that_begins_later_is_the_same_from_there(order, position, epoch):
    start, end = order.epoch_start(epoch), order.epoch_start(epoch + 1)
    assume(end > start)
    later = order.changed_to(version=order.version, beginning=Beginning(position=position, epoch=epoch))

    assert samples_of(later, range(position, position + end - start)) == samples_of(order, range(start, end))


@given(st.integers(2, 9), st.integers(0, 40), st.integers(0, 2**64), passes_of)
def test_no_batch_of_order_2_holds_a_sample_twice(batch, more, seed, passes):
    order = order_of([[(2 * batch + more, 1)]], batch, passes, seed, version=2)

    assert all(len(set(one)) == batch for one in samples_of(order, range(order.epoch_start(12))))


def test_weights_and_phases_of_datasets_hold():
    buckets = [[(30, Fraction(1, 2)), (50, 1)]]
    order = order_of(buckets, 4, BlockOrder(4, 1))
    seen = Counter(sample for batch in samples_of(order, range(order.epoch_start(20))) for sample in batch)
    assert {seen[sample] for sample in range(30)} <= {9, 10, 11}
    assert {seen[sample] for sample in range(30, 80)} <= {19, 20, 21}

    spans = [Span(), Span(start_epoch=2)]
    order = order_of([[(30, 1), (50, 1)]], 4, BlockOrder(4, 1), kind=ScheduledOrder, spans=spans)
    first = [sample for batch in samples_of(order, range(order.epoch_start(1))) for sample in batch]
    assert len(set(first)) == len(first)
    assert set(first) <= set(range(30))
    assert order.phases[1].order.passes == BlockOrder(4, 1)
    assert "data_order_block" in order.schedule
    assert "start_epoch" in order.schedule


def test_the_order_of_blocks_is_what_it_always_was():
    """Frozen values: if they change, no run can be resumed over the change."""
    order = order_of([[(100, 1), (7, 2)]], 6, BlockOrder(4, 2), seed=42, version=2)
    large = order_of([[(1_000_000, 1)]], 64, BlockOrder(8, 1), seed=42)

    assert samples_of(order, (0, 1, 9, 20)) == [
        [3, 0, 48, 56, 105, 104],
        [2, 51, 49, 57, 106, 106],
        [16, 101, 102, 30, 42, 10],
        [16, 63, 60, 68, 105, 106],
    ]
    assert large.batch(3).samples[:4].tolist() == [189087, 832562, 273542, 99394]
    assert large.batch(20_000).samples[:4].tolist() == [3404, 146229, 663072, 56570]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (4, 1), (8, 2), (32, 1)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_each_block_is_wanted_by_one_rank_at_about_one_time(ranks, accumulation, blocks):
    """Reads of an epoch, if each rank reads blocks as a whole, against its samples: 1/16 with blocks of 16."""
    size, batch, rows = 16, 64, 20_000
    order = order_of([[(rows, 1)]], batch, BlockOrder(size, blocks))
    each = batch // ranks // accumulation
    reads, last = 0, dict[tuple[int, int], int]()
    for position in range(order.epoch_start(1)):
        samples = order.batch(position).samples.reshape(accumulation, ranks, each)
        for rank in range(ranks):
            for block in set((samples[:, rank] // size).ravel().tolist()):
                known = last.get((rank, block), -(10**9))
                reads += position - known > 2 * size * blocks
                last[rank, block] = position
    assert reads * size / rows <= 1.05


def test_a_resume_with_another_block_is_refused_or_begins_another_order(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(8):
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    plugins = load_plugins(Selection(only=("toy", "cache")))

    def scanned(*flags):
        words = (
            f"--instance_data_dir={tmp_path}/images",
            f"--output_dir={tmp_path}/run",
            "--resolution=16",
            "--train_batch_size=2",
        )
        words += ("--model_family=toy", "--max_train_steps=1", "--use_cpu", "--caption_strategy=filename", *flags)
        config = resolve(schema_of(plugins), words, environment={})
        return config, scan_data(config, plugins, 8, tmp_path / "run/data")

    def resumed(trainer, *flags):
        return check_resumable(trainer, *scanned(*flags), tmp_path / "run/checkpoints/step-00000003")

    plain, blocks = scanned()[1], scanned("--data_order_block=4", "--data_order_window=2")[1]
    assert (plain.order.passes, blocks.order.passes) == (None, BlockOrder(4, 2))
    for data, flags in ((plain, ("--data_order_block=4",)), (blocks, ()), (blocks, ("--data_order_block=3",))):
        identities = [data.identity, Identity.earlier(data.indexes, data.order, data.settings)]
        for identity in identities:
            trainer = {"step": 3, "effective_batch": 2, "seed": 42, "data": identity.as_json()}
            with pytest.raises(CheckpointError, match=r"data_order_block of dataset images was .*, is now "):
                resumed(trainer, *flags)
            assert resumed(trainer, "--on_changed_data=continue", *flags).reordered
    trainer = {"step": 3, "effective_batch": 2, "seed": 42, "data": blocks.identity.as_json()}
    assert resumed(trainer, "--data_order_block=4", "--data_order_window=2") == Resumption()


def times_of(passes, rows, batch, count):
    """When each sample comes in some passes of a bucket: (count, rows)."""
    places = np.arange(rows)
    shuffled = [passes([(rows, 1)], batch, key)(places) if passes else permutation(rows, key) for key in range(count)]
    return np.argsort(shuffled, axis=1)


@pytest.mark.parametrize("passes", [None, BlockOrder(16, 1), BlockOrder(16, 4)])
def test_a_sample_comes_at_any_time_of_a_pass(passes):
    """How often the first and the last samples of blocks come in each twelfth of a pass: chi-square, in standard deviations."""
    rows, bins = 1536, 12
    times = times_of(passes, rows, batch=16, count=400)
    for member in (0, 15):  # samples of one block come in the same window, so they do not count twice
        counts = np.array([np.bincount(column, minlength=bins) for column in (times[:, member::16] * bins // rows).T])
        freedom = (len(counts) - 1) * (bins - 1)
        square = ((counts - 400 / bins) ** 2 / (400 / bins)).sum()
        assert abs(square - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("blocks", [1, 3])
def test_samples_of_a_block_are_mixed_in_its_window_and_blocks_in_the_whole_pass(blocks):
    """By the distances of pairs: a third of the window or of the pass on average, if the order has no pattern."""
    size, batch, rows = 16, 16, 3072 * 3
    times = times_of(BlockOrder(size, blocks), rows, batch, count=60)
    window = batch * size * blocks
    within = np.abs(times[:, ::size] - times[:, size - 1 :: size])
    next_block = np.abs(times[:, ::size] - np.roll(times[:, ::size], 1, axis=1))
    assert within.max() < window
    assert 0.31 < within.mean() / window < 0.36
    assert 0.31 < next_block.mean() / rows < 0.36
