"""Which files of a folder hold the weights."""

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from smalti.errors import UserError
from smalti.models.weight_files import plain_name, variant_of, weight_files
from smalti.models.weights import FolderWeights

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
    assert FolderWeights(tmp_path).get("a").dtype == torch.float16
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert FolderWeights(tmp_path).get("a").dtype == torch.float32
    assert FolderWeights(tmp_path, "fp16").get("a").dtype == torch.float16


@given(start=st.integers(0, 5), length=st.integers(0, 5))
def test_rows_are_those_of_the_tensor(start, length, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "rows.safetensors"
    tensor = torch.arange(40.0).view(10, 2, 2)
    save_file({"before": torch.ones(3), "a": tensor}, path)
    assert torch.equal(FolderWeights(path).rows("a", start, start + length), tensor[start : start + length])
