"""What ranks send each other before a save: every text arrives whole, and replicas send it once between them."""

from hashlib import sha256

from hypothesis import given, settings, strategies as st

from smalti.checkpoint.planning import joined, part_of


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.sampled_from(["", "a", "bc" * 7, "d" * 101, "é" * 30]), min_size=1, max_size=40))
def test_every_rank_has_the_text_of_every_other_and_replicas_send_it_once(texts):
    digests = [sha256(text.encode()).hexdigest() for text in texts]
    parts = [part_of(text, digests, rank) for rank, text in enumerate(texts)]
    assert joined(parts, digests) == texts
    assert sum(map(len, parts)) == sum(map(len, set(texts)))
    for text in set(texts):
        longest = max(len(part) for part, other in zip(parts, texts, strict=True) if other == text)
        assert longest <= -(-len(text) // texts.count(text))
