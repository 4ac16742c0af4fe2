"""Bria 3.2: what is zeros in its captions, and the types of its frozen parts."""

import torch
from kinds import EMPTY, PROMPTS


def test_the_empty_caption_is_zeros_as_for_the_pipeline_without_a_negative_prompt(family_of):
    family = family_of("bria")
    rows = family.encode_captions(["a fox", "", "two boats"])["tokens"]
    assert [bool(row.any()) for row in rows] == [True, False, True]
    assert torch.equal(rows[2], family.encode_captions(["two boats"])["tokens"][0])
    _, negative, _ = family.encoder.encode_prompt(list(PROMPTS), negative_prompt=list(EMPTY))
    assert torch.equal(family.encode_captions(EMPTY)["tokens"], negative)


def test_padding_is_zeros_that_do_not_depend_on_the_other_captions(family_of):
    """In the tiny tokenizer each character is a token, with one before the caption and one behind it."""
    (row,) = family_of("bria").encode_captions(["a fox"])["tokens"]
    assert row.shape[0] == 128
    assert row.any(dim=1).tolist() == [number < len(" a fox") + 1 for number in range(128)]


def test_the_last_layers_of_feed_forward_of_the_encoder_stay_in_fp32(family_of):
    family = family_of("bria", "--text_encoder_dtype=bf16")
    types = {name: each.dtype for name, each in family.encoder.text_encoder.named_parameters()}
    assert {name.rpartition("DenseReluDense.")[2] for name, each in types.items() if each == torch.float32} == {"wo.weight"}
    assert family.encode_captions(["a fox"])["tokens"].dtype == torch.bfloat16


def test_the_autoencoder_has_the_type_that_a_run_chooses(family_of):
    """Which the pipeline would change to fp32 as it is made."""
    for dtype, found in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert next(family_of("bria", f"--vae_dtype={dtype}").vae.parameters()).dtype == found
