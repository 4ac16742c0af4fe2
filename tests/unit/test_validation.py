"""Which rank draws what, and how large."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti import UserError
from smalti.config import resolve, schema_of
from smalti.plugins import load_plugins
from smalti.validation import picture_size, shares


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_every_prompt_is_drawn_and_every_rank_draws_the_same_number_of_equal_batches(count, ranks, batch):
    rows = shares(count, ranks, batch)
    assert {number for row in rows for numbers in row for number in numbers} == set(range(count))
    assert len({tuple(map(len, row)) for row in rows}) == 1


def size(*flags: str) -> tuple[int, int]:
    return picture_size(resolve(schema_of(load_plugins()), flags, environment={}), 8)


def test_pictures_are_as_large_as_the_training_pictures_unless_said_otherwise():
    assert size("--resolution=100", "--resolution_type=pixel") == (96, 96)


def test_an_area_in_megapixels_gives_a_square_of_that_area():
    assert size("--resolution=0.262144", "--resolution_type=area") == (512, 512)


def test_a_size_may_be_given_with_width_and_height():
    assert size("--validation_resolution=512x768") == (512, 768)


@pytest.mark.parametrize("text", ["big", "0", "100", "512x", "64x65"])
def test_a_size_that_cannot_be_drawn_is_refused(text):
    with pytest.raises(UserError, match="validation_resolution"):
        size(f"--validation_resolution={text}")
