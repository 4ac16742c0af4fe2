"""Which files of a folder hold the weights."""

import json

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from smalti.errors import UserError
from smalti_diffusers.sources.weight_files import folder_weights, plain_name, variant_of, weight_files

SHARDS = ("", "-00001-of-00002")


@pytest.mark.parametrize(
    ("name", "variant", "plain"),
    [
        ("model.safetensors", None, "model.safetensors"),
        ("model-00001-of-00002.safetensors", None, "model-00001-of-00002.safetensors"),
        ("model.safetensors.index.json", None, "model.safetensors.index.json"),
        ("model.fp16.safetensors", "fp16", "model.safetensors"),
        ("model.fp16-00001-of-00002.safetensors", "fp16", "model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.fp16.safetensors", "fp16", "model-00001-of-00002.safetensors"),
        ("model.safetensors.index.fp16.json", "fp16", "model.safetensors.index.json"),
        ("config.json", None, "config.json"),
    ],
)
def test_names_of_diffusers_and_transformers_tell_their_variant(name, variant, plain):
    assert (variant_of(name), plain_name(name)) == (variant, plain)


@given(
    variants=st.sets(st.sampled_from([None, "fp16", "bf16", "ema"]), min_size=1),
    asked=st.sampled_from([None, "fp16", "bf16"]),
    shards=st.sampled_from(SHARDS),
)
def test_the_files_of_one_variant_are_chosen_or_the_choice_is_left_to_the_user(variants, asked, shards):
    files = {key: f"model{f'.{key}' if key else ''}{shards}.safetensors" for key in variants}
    names = ["config.json", "model.bin", *files.values()]
    if None not in variants and asked not in variants and (asked is not None or len(variants) > 1):
        with pytest.raises(UserError) as caught:
            weight_files(names, asked)
        assert caught.value.fix.removeprefix("--variant=") in variants
        return
    chosen = weight_files(names, asked)
    expected = asked if asked in variants else None if None in variants else next(iter(variants))
    assert (chosen.variant, chosen.files) == (expected, (files[expected],))


def test_a_variant_is_read_where_it_is_asked_for_and_where_there_is_nothing_else(tmp_path):
    save_file({"a": torch.ones(2).half()}, tmp_path / "model.fp16.safetensors")
    assert folder_weights(tmp_path).get("a").dtype == torch.float16
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert folder_weights(tmp_path).get("a").dtype == torch.float32
    assert folder_weights(tmp_path, "fp16").get("a").dtype == torch.float16


def test_an_index_says_which_files_count(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    found = folder_weights(tmp_path)
    assert (list(found.names()), found.get("a").tolist()) == (["a"], [1, 1])


def test_a_file_that_the_index_names_and_is_not_there_is_told(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    with pytest.raises(UserError, match=r"lacks model-1\.safetensors"):
        folder_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"first.weight": 1}}'])
def test_a_damaged_index_of_weights_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json .*\n  fix: copy or download it again"):
        folder_weights(tmp_path)
