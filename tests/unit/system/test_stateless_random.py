"""Keys: every bit and the order of the words count."""

from hypothesis import given, strategies as st

from smalti.system.stateless_random import derive_seed

words = st.integers(min_value=0, max_value=2**64 - 1)


def test_a_changed_bit_changes_half_of_the_key() -> None:
    flips = [(derive_seed(9, 4) ^ derive_seed(9, 4 ^ (1 << bit))).bit_count() for bit in range(64)]
    assert min(flips) > 16
    assert 28 < sum(flips) / 64 < 36


@given(words, words)
def test_a_key_knows_the_order_of_its_words(a: int, b: int) -> None:
    assert (derive_seed(a, b) == derive_seed(b, a)) == (a == b)
