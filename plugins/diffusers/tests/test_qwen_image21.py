"""Qwen-Image 2.1: token ids without torchvision, a channel of transparency, and where an image is after its text."""

from copy import deepcopy

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from kinds import PROMPTS, opened
from PIL import Image
from test_validation_images import sampled

from smalti import UserError
from smalti_diffusers.families.autoencoders import over_white
from smalti_diffusers.families.text_first import text_first
from smalti_diffusers.families.text_processor import TextProcessor
from smalti_diffusers.sources.components import Components

KIND = "qwen image 2.1"
SYSTEM = [{"role": "system", "content": [{"type": "text", "text": "Comprehend and analyze the provided prompt."}]}]


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(KIND)


@pytest.fixture(scope="module")
def pipeline(family):
    return opened(family.components.folder)


def test_token_ids_are_those_of_the_processor_for_texts_and_images(family, pipeline):
    ours, theirs = TextProcessor(family.components.folder / "processor"), pipeline.processor
    assert type(theirs).__name__ == "Qwen3VLProcessor"
    given = {"text": ["a <|im_end|> fox", "two boats\n"], "padding": True, "padding_side": "left", "return_tensors": "pt"}
    mine, found = ours(**given), theirs(**given)
    assert torch.equal(mine.input_ids, found.input_ids)
    assert torch.equal(mine.attention_mask, found.attention_mask)
    assert not mine.attention_mask.all()
    counted = [each.apply_chat_template(SYSTEM, tokenize=True, return_dict=False) for each in (ours, theirs)]
    assert counted[0] == counted[1]
    assert len(counted[0][0]) == pipeline._drop_idx > 10


def test_a_template_of_the_processor_goes_before_that_of_the_tokenizer(family, tmp_path):
    folder = family.components.folder / "processor"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].role }}"}')  # the older file
    processor = TextProcessor(tmp_path)
    ids = processor.apply_chat_template(SYSTEM, tokenize=True, return_dict=False)
    assert ids == [processor.tokenizer("system").input_ids]


def test_a_photo_is_encoded_as_the_pipeline_encodes_an_opaque_reference(family, pipeline):
    photo = Image.effect_noise((64, 32), 80).convert("RGB")
    pixels = pipeline.image_processor.preprocess(photo.convert("RGBA"), height=32, width=64)
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(pixels.unsqueeze(2), generator=None).squeeze(2)
        torch.testing.assert_close(family.encode_images(pixels[:, :3]), theirs)


def test_what_is_transparent_is_white():
    red, halves = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.5, 0.0])
    images = torch.stack([*red.expand(3, 3).T, halves]).view(1, 4, 1, 3)
    assert over_white(images).squeeze().T.tolist() == [[1, 0, 0], [1, 0.5, 0.5], [1, 1, 1]]


@pytest.fixture(scope="module")
def models(family):
    """Diffusers' own transformer, and one whose tokens follow the text."""
    theirs = QwenImage21Transformer2DModel.from_pretrained(family.components.folder / "transformer").eval()
    ours = deepcopy(theirs)
    text_first(ours)
    return theirs, ours


def arguments(family, captions):
    noisy = torch.randn(len(captions), 4, 2, 6, generator=torch.Generator().manual_seed(0))
    return family.inputs(noisy, torch.tensor([300.0, 900.0])[: len(captions)], family.encode_captions(captions))


@pytest.mark.parametrize("causal", [True, False])
def test_one_text_and_one_image_are_computed_as_by_diffusers(family, models, causal):
    with torch.no_grad():
        given = arguments(family, ["a fox", "a cat"])
        found = []
        for model in models:
            model.register_to_config(causal_condition=causal)
            found.append(model(**given, return_dict=False)[0])
            model.register_to_config(causal_condition=True)
    assert "encoder_hidden_states_mask" in given
    torch.testing.assert_close(found[1], found[0])


def test_keys_and_values_of_the_text_may_be_kept(family, models):
    """As the pipeline keeps them; with a text that is padded, too."""
    with torch.no_grad():
        given, cache = arguments(family, PROMPTS), QwenImage21KVCache(2)
        first, second = (models[1](**given, kv_cache=cache, kv_cache_mode=mode).sample for mode in ("extract", "cached"))
        plain = models[1](**given).sample
    assert not given["encoder_hidden_states_mask"].all()
    torch.testing.assert_close(first, plain)
    torch.testing.assert_close(second, plain[:, -second.shape[1] :])


def test_an_image_is_where_it_is_without_its_neighbours(family, models):
    """Diffusers places those of a batch after the longest text."""
    with torch.no_grad():
        together, alone = arguments(family, PROMPTS), arguments(family, PROMPTS[1:])
        alone |= {"hidden_states": together["hidden_states"][1:], "timestep": together["timestep"][1:]}
        theirs, ours = ([model(**each).sample[-1, -12:] for each in (together, alone)] for model in models)
    torch.testing.assert_close(theirs[1], ours[1])
    torch.testing.assert_close(ours[0], ours[1])
    assert (theirs[0] - theirs[1]).abs().max() > 1e-3


def test_a_copy_computes_with_its_own_weights(family, models):
    copy = deepcopy(models[1])
    with torch.no_grad():
        copy.proj_out.weight.zero_()
        given = arguments(family, ["a fox"])
        assert not copy(**given).sample.any()
        assert models[1](**given).sample.any()


def test_a_caption_that_is_too_long_is_refused_with_its_beginning(family_of):
    with pytest.raises(UserError, match=r"the caption 'A red fox in the snow' is longer .*=16: it has 2\d tokens") as refused:
        family_of(KIND, "--tokenizer_max_length=16").encode_captions(["a", "A red fox in the snow"])
    assert "larger --tokenizer_max_length" in refused.value.fix


def test_noise_levels_of_the_pipeline_are_no_part_of_it(family_of):
    family = family_of(f"{KIND} sigmas")
    components = Components(family.components.folder)
    assert components.settings["sample_sigmas"] == [1.0, 0.6]
    assert "sample_sigmas" not in components.parts()
    sampled(family, steps=7, guidance=1.0, prompts=["a fox"], seeds=(1,), height=32)
    assert len(family.frozen.scheduler.timesteps) == 2  # whatever a run asks for


def test_the_shift_counts_latent_pixels(family):
    """Each is a token, though sizes are multiples of two of them."""
    assert (family.alignment, family.image_tokens(1024, 512)) == (32, 64 * 32)
    shift = torch.tensor(0.5 + (0.9 - 0.5) * (64 * 32 - 256) / (4096 - 256)).exp()
    assert family.flow_shift.at(64 * 32) == pytest.approx(float(shift), rel=1e-5)
