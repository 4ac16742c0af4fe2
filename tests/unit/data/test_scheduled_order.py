"""Datasets that begin or end during the run: who is trained on when, and that it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from smalti.data.batch_check import BatchShape
from smalti.data.buckets import Bucket
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.order import Beginning, BucketSamples, Part
from smalti.data.plan.scheduled_order import ScheduledOrder, Span
from smalti.data.prepared import DataRules, PreparedData, build_datasets, prepare
from smalti.errors import PreflightError

settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")

BATCH = 4


def order_of(spans: Sequence[Span], sizes: Sequence[int] = (12, 10, 9)) -> ScheduledOrder:
    """One bucket; dataset k has the samples from 100 k on."""
    parts = [
        Part(dataset=number, rows=np.arange(size, dtype=np.uint32), offset=100 * number)
        for number, size in enumerate(sizes[: len(spans)])
    ]
    buckets = [BucketSamples(bucket=Bucket(8, 8), parts=tuple(parts))]
    return ScheduledOrder(buckets, spans=spans, seed=5, effective_batch=BATCH)


def datasets_at(order: ScheduledOrder, positions: range) -> list[set[int]]:
    return [{sample // 100 for sample in order.batch(position).samples.tolist()} for position in positions]


steps = st.none() | st.integers(1, 30)
epochs = st.none() | st.integers(1, 6)
spans = st.builds(Span, start_step=steps, end_step=steps, start_epoch=epochs, end_epoch=epochs)


@settings(max_examples=60)
@given(st.lists(spans, min_size=1, max_size=2))
def test_a_batch_holds_samples_of_the_datasets_of_its_step_alone(some: list[Span]) -> None:
    order = order_of([Span(), *some])
    for position in range(40):
        place = Beginning(position=position, epoch=order.epoch_of(position))
        active = {number for number, span in enumerate([Span(), *some]) if span.holds(place)}
        seen = {sample // 100 for sample in order.batch(position).samples.tolist()}
        assert seen <= active
    for phase in order.phases:
        end = phase.order.epoch_start(phase.start.epoch + 1)
        later = [other.start.position for other in order.phases if other.start.position > phase.start.position]
        if not later or end <= min(later):  # a whole epoch: every dataset of the phase was seen
            active = {number for number, span in enumerate([Span(), *some]) if span.holds(phase.start)}
            assert set().union(*datasets_at(order, range(phase.start.position, end))) == active


@settings(max_examples=60)
@given(st.lists(spans, min_size=1, max_size=2))
def test_epochs_follow_each_other(some: list[Span]) -> None:
    order = order_of([Span(), *some])
    found = [order.epoch_of(position) for position in range(60)]

    assert found[0] == 0
    assert all(later - former in (0, 1) for former, later in pairwise(found))
    assert [order.epoch_start(epoch) for epoch in range(found[-1] + 1)] == [found.index(one) for one in range(found[-1] + 1)]


def test_steps_and_epochs_count_from_one_and_the_last_one_is_included() -> None:
    order = order_of([Span(end_step=7), Span(start_step=4, end_epoch=3), Span(start_epoch=4)])
    firsts = [(phase.start.position, phase.start.epoch) for phase in order.phases]

    # Epoch 1 is 12 / 4 batches; from step 4 on 22 / 4 in an epoch; after step 7 dataset 0 is gone, and epoch 3 has 10 / 4.
    assert firsts == [(0, 0), (3, 1), (7, 2), (order.epoch_start(3), 3)]
    assert datasets_at(order, range(3)) == [{0}] * 3
    assert set().union(*datasets_at(order, range(3, 7))) == {0, 1}
    assert datasets_at(order, range(7, order.epoch_start(3))) == [{1}] * (order.epoch_start(3) - 7)
    assert datasets_at(order, range(order.epoch_start(3), 20))[-1] == {2}


@given(spans, st.integers(0, 25))
def test_positions_can_be_asked_for_in_any_order_and_by_any_process(span: Span, position: int) -> None:
    one, other = order_of([Span(), span]), order_of([Span(), span])
    whole = [one.batch(number).samples.tolist() for number in range(position + 1)]

    assert other.batch(position).samples.tolist() == whole[-1]
    assert next(other.replacements(other.batch(position), BATCH - 2)) == whole[-1][-1]


@given(spans, st.integers(1, 25))
def test_an_order_that_begins_later_has_the_same_schedule(span: Span, position: int) -> None:
    order = order_of([Span(), span])
    epoch = order.epoch_of(position)
    assume(order.epoch_start(epoch) < position)
    later = order.changed_to(beginning=Beginning(position=position, epoch=epoch + 1))

    assert isinstance(later, ScheduledOrder)
    assert later.epoch_of(position) == epoch + 1
    for place in range(position, position + 20):
        here = Beginning(position=place, epoch=later.epoch_of(place))
        if not span.holds(here):
            assert max(later.batch(place).samples.tolist()) < 100


def test_an_order_ends_with_its_last_dataset() -> None:
    order = order_of([Span(end_step=5), Span(end_epoch=1)])

    assert (order.end, order.epoch_start(50)) == (5, 5)
    with pytest.raises(PreflightError, match="no dataset is trained on after step 5"):
        order.batch(5)
    with pytest.raises(PreflightError, match="no dataset is trained on from the first step"):
        order_of([Span(start_step=2)])
    with pytest.raises(PreflightError, match="no bucket has 4 samples, an effective batch, of the datasets of step 3"):
        order_of([Span(end_step=2), Span()], (12, 3))


# --- from entries ------------------------------------------------------------------------------------------------------


def images(folder: Path, count: int, size: tuple[int, int] = (16, 16)) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        path = folder / f"{size[0]}-{number}.png"
        Image.new("RGB", size).save(path)
        path.with_suffix(".txt").write_text("a caption")
    return str(folder)


def data_of(*entries: dict[str, object]) -> PreparedData:
    specs, problems = parse_datasets(list(entries), where="data.json", defaults=DataDefaults(resolution=16))
    assert problems == ()
    shape = BatchShape(train_batch_size=BATCH, ranks=1, accumulation=1)
    return prepare(build_datasets(specs, Catalog()), DataRules(seed=1, shape=shape, alignment=8))


def test_entries_say_when_a_dataset_is_trained_on(tmp_path: Path) -> None:
    photos = {"id": "photos", "instance_data_dir": images(tmp_path / "photos", 8)}
    art = {"id": "art", "instance_data_dir": images(tmp_path / "art", 8)}
    plain = data_of(photos, {**art, "start_step": 1, "start_epoch": 0, "end_step": 0})
    data = data_of(photos, {**art, "start_step": 3})

    assert not isinstance(plain.order, ScheduledOrder)
    assert [min(data.order.batch(position).samples) >= 8 for position in range(2)] == [True, True]  # "photos" alone
    assert any(min(data.order.batch(position).samples) < 8 for position in range(2, 6))
    assert data.settings["art"]["start_step"] == 3
    assert data.identity.order != data_of(photos, {**art, "start_step": 4}).identity.order != plain.identity.order


def test_buckets_that_need_another_dataset_are_left_out_until_it_begins(tmp_path: Path) -> None:
    photos = {"id": "photos", "instance_data_dir": images(tmp_path / "photos", 8)}
    images(tmp_path / "photos", 2, (32, 16))
    art = {"id": "art", "instance_data_dir": images(tmp_path / "art", 8, (32, 16)), "start_step": 9}
    data = data_of(photos, art)
    wide = Bucket(24, 8)

    assert wide in [content.bucket for content in data.order.buckets]
    assert {data.order.batch(position).bucket for position in range(8)} == {Bucket(16, 16)}
    assert wide in {data.order.batch(position).bucket for position in range(8, 14)}
    assert data.notices == (f"from step 1 on buckets are left out that do not fill a batch of 4: {wide} (2 samples)",)
