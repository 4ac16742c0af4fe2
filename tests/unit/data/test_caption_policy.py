"""What visits train on of the captions of an image: the same for any rank and any resume, and known before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from smalti.data.datasets.caption_policy import CACHED_VARIANTS, CaptionPolicy
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import DatasetSpec


def spec_of(**values: object) -> DatasetSpec:
    specs, problems = parse_datasets([{"id": "a", "instance_data_dir": "a", **values}], where="", defaults=DataDefaults())
    assert not problems
    return specs[0]


def policy_of(**values: object) -> CaptionPolicy:
    return CaptionPolicy(spec=spec_of(**values))


def visits(policy: CaptionPolicy, captions: Sequence[str], count: int = 400, *, cached: bool = False) -> list[str]:
    """The texts of visits of one image, one in each epoch."""
    return [
        policy.pick(captions, seed=1, epoch=number, sample=5, visit=7 * number + 3, cached=cached) for number in range(count)
    ]


tags_of = st.lists(st.text("abcdefgh ", min_size=1, max_size=6).filter(str.strip).map(str.strip), min_size=1, max_size=9)


def test_without_keys_a_caption_is_as_it_is() -> None:
    policy = policy_of()
    captions = ("a,  b ,c", " d")

    assert policy.texts(captions) == captions
    assert set(visits(policy, captions)) == set(captions)
    assert policy.first(captions) == captions[0]


@settings(max_examples=60, deadline=None)
@given(tags=tags_of, kept=st.integers(0, 4), rate=st.sampled_from([0.0, 0.5, 1.0]), visit=st.integers(0, 10**12))
def test_kept_tags_stay_in_front_and_the_others_are_shuffled_or_dropped(
    tags: list[str], kept: int, rate: float, visit: int
) -> None:
    policy = policy_of(caption_shuffle={"position_start": kept}, caption_tag_dropout_rate=rate)
    text = policy.pick([", ".join(tags)], seed=1, epoch=0, sample=0, visit=visit, cached=False)
    found = text.split(", ") if text else []

    assert found[:kept] == tags[:kept]
    assert not Counter(found[kept:]) - Counter(tags[kept:])
    if rate == 0.0:
        assert Counter(found) == Counter(tags)
    if rate == 1.0:
        assert found == tags[:kept]


@settings(max_examples=60, deadline=None)
@given(
    captions=st.lists(tags_of.map(", ".join), min_size=1, max_size=3),
    count=st.sampled_from([None, 1, 3]),
    original=st.booleans(),
    rate=st.sampled_from([0.0, 0.3]),
    visit=st.integers(0, 10**12),
    epoch=st.integers(0, 1000),
)
def test_every_visit_picks_one_of_the_texts_that_are_encoded_before(
    captions: list[str], count: int | None, original: bool, rate: float, visit: int, epoch: int
) -> None:
    values = {"caption_prefix": "p", "caption_suffix": ", s", "trigger_word": "a", "caption_filter_list": ["b+"]}
    for more in ({}, values, {"caption_weights": [0, 1]}):
        policy = policy_of(
            caption_shuffle={"count": count, "include_original": original}, caption_tag_dropout_rate=rate, **more
        )
        text = policy.pick(captions, seed=3, epoch=epoch, sample=4, visit=visit, cached=True)

        assert text in policy.texts(captions)


def test_cached_texts_have_few_variants_and_others_as_many_as_visits() -> None:
    policy, caption = policy_of(caption_shuffle=True), [", ".join("abcdefghij")]

    assert len(set(visits(policy, caption, cached=True))) == len(policy.texts(caption)) == CACHED_VARIANTS
    assert len(set(visits(policy, caption))) > 390
    assert len(set(visits(policy_of(caption_shuffle={"count": 7}), caption))) == 7


def test_the_original_is_one_of_the_variants_where_it_is_asked_for() -> None:
    policy, caption = policy_of(caption_shuffle={"count": 1, "include_original": True}), "a, b, c, d, e, f, g"

    assert Counter(visits(policy, [caption]))[caption] == pytest.approx(200, abs=60)
    assert caption not in policy_of(caption_shuffle=True).texts([caption])


def test_as_many_tags_are_dropped_as_the_rate_says() -> None:
    caption = [", ".join(f"t{number}" for number in range(20))]
    texts = visits(policy_of(caption_tag_dropout_rate=0.3), caption)
    count = Counter(tag for text in texts for tag in text.split(", "))

    assert sum(count.values()) == pytest.approx(0.7 * 20 * 400, rel=0.03)
    assert all(each == pytest.approx(280, abs=60) for each in count.values())
    assert texts[0].split(", ") == sorted(texts[0].split(", "), key=lambda tag: int(tag[1:]))  # dropped, and not shuffled


def test_a_shuffle_reaches_every_order_about_as_often() -> None:
    count = Counter(visits(policy_of(caption_shuffle=True), ["a, b, c"], 1200))

    assert len(count) == 6
    assert all(each == pytest.approx(200, abs=60) for each in count.values())


def test_weights_say_how_often_each_caption_comes_up() -> None:
    count = Counter(visits(policy_of(caption_weights=[3, 1]), ["long", "short", "never"]))

    assert set(count) == {"long", "short"}
    assert count["long"] == pytest.approx(300, abs=40)


def test_a_column_that_an_image_lacks_leaves_its_share_to_the_others() -> None:
    policy = policy_of(caption_weights=[3, 1, 1])
    count = Counter(visits(policy, ["", "b", "c"]))

    assert count["b"] == pytest.approx(200, abs=50)
    assert set(count) == {"b", "c"} == set(policy.texts(["", "b", "c"]))
    assert policy.first(["", "b", "c"]) == "b"
    assert set(visits(policy_of(caption_weights=[1, 0]), ["", "b"])) == {"b"}  # better than no caption


def test_texts_around_a_caption_stay_where_they_are() -> None:
    policy = policy_of(caption_shuffle=True, caption_prefix="photo of", caption_suffix=", high quality")
    texts = visits(policy, ["a, b, c"])

    assert all(text.startswith("photo of ") and text.endswith(", high quality") for text in texts)
    assert policy.first(["a, b, c"]) == "photo of a, b, c, high quality"


def test_an_instance_prompt_in_front_is_not_a_tag() -> None:
    policy = policy_of(instance_prompt="zwx cat", prepend_instance_prompt=True, caption_shuffle=True)

    assert all(text.startswith("zwx cat ") for text in visits(policy, ["zwx cat a, b, c"]))


@pytest.mark.parametrize(
    ("caption", "text"),
    [("a cat", "zwx a cat"), ("a zwx cat", "a zwx cat"), ("photo of [trigger], night", "photo of zwx, night")],
)
def test_a_trigger_word_is_in_every_caption(caption: str, text: str) -> None:
    assert policy_of(trigger_word="zwx").first([caption]) == text


def test_filters_remove_and_replace(tmp_path: Path) -> None:
    lines = ["very ", "s/cat(s?)/dog\\1/i", "s/a\\/b/c/"]
    (tmp_path / "filters.txt").write_text("\n".join(lines))
    for given_as in (lines, str(tmp_path / "filters.txt")):
        assert policy_of(caption_filter_list=given_as).first(["two very large Cats, a/b"]) == "two large dogs, c"


def test_filters_of_a_text_embeds_entry_apply_to_the_datasets_that_use_it() -> None:
    texts = {"id": "t", "dataset_type": "text_embeds", "caption_filter_list": ["x"]}
    entries = [texts, {"id": "a", "instance_data_dir": "a", "caption_filter_list": ["y"]}]
    specs, _ = parse_datasets(entries, where="", defaults=DataDefaults())

    assert specs[0].caption_filter_list == ("x", "y")


def test_a_filter_that_is_no_expression_is_refused() -> None:
    for wrong in (["("], ["s/a/\\2/"], "missing.txt"):
        _, problems = parse_datasets(
            [{"id": "a", "instance_data_dir": "a", "caption_filter_list": wrong}], where="", defaults=DataDefaults()
        )
        assert len(problems) == 1
        assert "caption_filter_list" in str(problems[0])


@pytest.mark.parametrize("block", [{}, {"enable": False, "count": 3}, {"enabled": "false"}, "false", None])
def test_a_shuffle_that_is_off_changes_nothing(block: object) -> None:
    assert policy_of(caption_shuffle=block).keeps_captions
