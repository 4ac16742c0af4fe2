"""LongCat-Image: text in quotation marks, and the places of tokens where captions are shorter than the published ones."""

import torch


def test_text_in_quotation_marks_is_one_token_for_each_character(family_of):
    """In the tiny tokenizer, " color" is one token; the space, the quotation marks and the letters are one each."""
    family, counts = family_of("longcat image"), []
    note = lambda module, inputs, given: counts.extend(given["attention_mask"].sum(dim=1).tolist())
    family.encoder.text_encoder.register_forward_pre_hook(note, with_kwargs=True)
    rows = family.encode_captions(["a color", 'a "color"'])["tokens"]
    assert counts[1] - counts[0] == len(' "color"') - 1
    assert not torch.equal(*rows)


def test_image_tokens_stay_where_the_model_knows_them_whatever_the_length_of_captions(family_of):
    short, usual = family_of("longcat image", "--tokenizer_max_length=24"), family_of("longcat image")
    noisy = torch.randn(1, 16, 4, 6)
    few, many = (family.inputs(noisy, torch.zeros(1), family.encode_captions(["a fox"])) for family in (short, usual))
    assert torch.equal(few["img_ids"], many["img_ids"])
    assert torch.equal(few["txt_ids"], many["txt_ids"][:24])
    assert many["img_ids"][[0, -1]].tolist() == [[1, 512, 512], [1, 513, 514]]
