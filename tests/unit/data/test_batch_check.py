"""Whether every bucket fills a batch, and what is said when one does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.batch_check import BatchShape, BucketCount, Share
from smalti.data.buckets import Bucket
from smalti.data.plan.short_buckets import handle_short_buckets
from smalti.errors import ExitCode, PreflightError

settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")


def count(width: int, *shares: tuple[str, int, int]) -> BucketCount:
    return BucketCount(
        bucket=Bucket(width, 64), shares=tuple(Share(dataset=name, samples=n, repeats=r) for name, n, r in shares)
    )


SHAPE = BatchShape(train_batch_size=2, ranks=4, accumulation=2)


def test_full_buckets_pass_without_change() -> None:
    assert handle_short_buckets([count(64, ("pets", 8, 1))], SHAPE, "error", {}).raised == {}


def test_the_error_gives_every_number_and_every_way_out() -> None:
    with pytest.raises(PreflightError) as caught:
        handle_short_buckets(
            [count(64, ("pets", 40, 0)), count(128, ("pets", 7, 0)), count(192, ("pets", 3, 0))], SHAPE, "error", {}
        )
    told = str(caught.value)

    assert told.splitlines()[0] == "Dataset configuration will produce zero usable batches."
    for words in (
        "Dataset ID: pets",
        "total samples: 50",
        "repeats: 0",
        "batch size (train_batch_size): 2",
        "ranks: 4",
        "gradient accumulation steps: 2",
        "effective batch size: 2 x 4 x 2 = 16",
        "2 bucket(s) have too few samples:",
        "128x64: 7 samples x (0 repeats + 1) = 7, needs 16. Minimum repeats required: 2",
        "192x64: 3 samples x (0 repeats + 1) = 3, needs 16. Minimum repeats required: 5",
        "more repeats: at least 5",
        "--allow_dataset_oversubscription",
    ):
        assert words in told
    assert "Note:" not in told
    assert caught.value.exit_code is ExitCode.PREFLIGHT


def test_the_error_says_which_smaller_numbers_would_do() -> None:
    with pytest.raises(PreflightError) as caught:
        handle_short_buckets([count(64, ("pets", 9, 0))], SHAPE, "error", {})

    assert "a smaller --train_batch_size: 1 instead of 2" in str(caught.value)
    assert "fewer ranks (--num_processes): 2 instead of 4" in str(caught.value)


def test_with_the_flag_repeats_of_short_buckets_are_raised_and_reported() -> None:
    counts = [count(64, ("pets", 40, 0)), count(128, ("pets", 7, 0))]
    handled = handle_short_buckets(counts, SHAPE, "repeat", {})

    assert handled.raised == {Bucket(128, 64): 2}
    assert handled.notices == (
        "bucket 128x64: repeats raised to 2 (pets), because 7 samples do not fill an effective batch of 16",
    )


def test_the_flag_does_not_raise_repeats_that_were_set_by_hand() -> None:
    with pytest.raises(PreflightError, match="repeats that you set are not changed") as caught:
        handle_short_buckets([count(64, ("pets", 3, 1))], SHAPE, "repeat", {})

    assert "raises the repeats of these buckets automatically" not in str(caught.value)


def test_beside_repeats_set_by_hand_the_others_are_raised() -> None:
    counts = [count(64, ("by-hand", 3, 1), ("auto", 2, 0))]

    assert handle_short_buckets(counts, SHAPE, "repeat", {}).raised == {Bucket(64, 64): 4}


shares = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=3)


@given(shares, st.integers(1, 64))
def test_the_minimum_repeats_are_just_enough(parts: list[tuple[str, int, int]], batch: int) -> None:
    one = count(64, *parts)
    repeats = one.needed_repeats(batch, override_manual=True)

    assert repeats is not None
    assert one.total_with(repeats, override_manual=True) >= batch
    assert repeats == 0 or one.total_with(repeats - 1, override_manual=True) < batch
