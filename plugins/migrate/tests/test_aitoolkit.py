"""Configurations of ai-toolkit."""

import copy
import json

import pytest

PROCESS = {
    "type": "sd_trainer",
    "training_folder": "out",
    "network": {"type": "lora", "linear": 16},
    "datasets": [{"folder_path": "nowhere", "default_caption": "a cat", "resolution": [512, 1024]}],
    "train": {
        "steps": 1000,
        "lr": 1e-4,
        "optimizer": "adamw8bit",
        "dtype": "bf16",
        "ema_config": {"use_ema": False, "ema_decay": 0.99},
    },
    "model": {"name_or_path": "x", "arch": "zimage:turbo", "quantize": True},
    "sample": {"prompts": ["[trigger], a photo of [name]"], "neg": "ugly", "width": 640},
}

OFF = {"config.json: train.ema_config.ema_decay"}
"""What is always listed: it is given for an EMA that is off."""


def convert(imported, **changes):
    process = copy.deepcopy(PROCESS)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        process[section] = {**process[section], name: value} if name else value
    return imported({"config.json": json.dumps({"config": {"name": "zwx", "process": [process]}})})


def test_what_it_does_by_default_is_written_where_it_differs(imported):
    values, left, _ = convert(imported)
    expected = {
        "model_family": "z_image",
        "output_dir": "out/zwx",
        "lora_rank": 16,
        "lora_alpha": 16,
        "lora_targets": ["layers.*"],
        "adam_epsilon": 1e-6,
        "gradient_checkpointing": True,
        "timestep_distribution": "logit_normal",
        "flow_schedule_shift": 1,
        "caption_dropout_probability": 0.0,
        "base_model_precision": "fp8-torchao",
        "validation_prompt": ["a photo of zwx"],
        "validation_negative_prompt": "ugly",
        "validation_resolution": "640x512",
        "validation_guidance": 7,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values.keys() & {"use_ema", "ema_decay"} == set()
    assert [(each["id"], each["resolution"]) for each in values["datasets"]] == [("nowhere", [512, 1024])]
    assert all(each["instance_prompt_fallback"] and each["instance_prompt"] == "a cat" for each in values["datasets"])
    assert left.keys() == OFF


def test_what_is_done_with_tags_and_mirrored_copies_become_keys_of_the_dataset(imported):
    row = {"folder_path": "nowhere", "num_repeats": 3, "flip_x": True, "shuffle_tokens": True, "keep_tokens": 1}
    rows = [row, {"folder_path": "more", "token_dropout_rate": 0.2, "caption_dropout_rate": 0.05}]
    values, left, _ = convert(imported, datasets=rows, trigger_word="zwx")
    one, other = values["datasets"]

    assert (one["repeats"], one["flip_probability"], one["caption_shuffle"]) == (5, 0.5, {"position_start": 1})
    assert (other["caption_shuffle"], other["caption_tag_dropout_rate"]) == ({"enable": False}, 0.2)
    assert [each["caption_dropout_probability"] for each in (one, other)] == [0.0, 0.05]
    assert [each["trigger_word"] for each in (one, other)] == ["zwx", "zwx"]
    assert left.keys() == OFF


def test_steps_that_count_micro_batches_are_divided(imported):
    values = convert(imported, train__gradient_accumulation_steps=4, save={"save_every": 100})[0]
    found = [values[key] for key in ("max_train_steps", "gradient_accumulation_steps", "checkpoint_step_interval")]
    assert found == [250, 4, 25]
    values = convert(imported, train__gradient_accumulation=4)[0]
    assert (values["max_train_steps"], values["gradient_accumulation_steps"]) == (1000, 4)


@pytest.mark.parametrize(("sampler", "expected"), [("flowmatch", None), ("ddim", "ddim")])
def test_samplers_become_schedulers_of_validation_images(imported, sampler, expected):
    values, left, _ = convert(imported, sample={"sampler": sampler})
    assert (values.get("validation_noise_scheduler"), left.keys()) == (expected, OFF)


ENCODERS = {
    "arch: sd1": ({"arch": "sd1"}, "sd1x", True),
    "arch: sd2": ({"arch": "sd2", "use_text_encoder_1": False}, "sd2x", None),
    "older": ({"is_v2": True, "is_v_pred": True}, "sd2x", True),
    "default": ({}, "sd1x", True),
    "other": ({"is_vega": True}, None, None),
    "flow": ({"arch": "ernie_image"}, "ernie", None),
}


@pytest.mark.parametrize("given", ENCODERS)
def test_the_model_is_sd_1_by_default_whose_text_encoder_can_be_trained(imported, given):
    model, family, trained = ENCODERS[given]
    values, left, _ = convert(imported, model={"name_or_path": "x", **model}, train__train_text_encoder=True)
    assert (values.get("model_family"), values.get("train_text_encoder")) == (family, trained)
    assert values.keys().isdisjoint({"text_encoder_lr", "text_encoder_2_lr"})
    assert any("train_text_encoder" in place for place in left) == (family in (None, "ernie"))


def test_without_a_network_the_whole_model_is_trained_and_not_quantised(imported):
    values, left, _ = convert(imported, network={})
    assert (values["model_type"], values.keys() & {"lora_rank", "lora_alpha", "base_model_precision"}) == ("full", set())
    assert "config.json: model.quantize" in left


def test_a_repository_is_named_only_if_it_is_published_to(imported):
    save = {"push_to_hub": True, "hf_repo_id": "me/zwx", "hf_private": False}
    values = convert(imported, save=save)[0]
    assert [values.get(key) for key in ("push_to_hub", "hub_model_id", "hub_private")] == [True, "me/zwx", False]
    assert "hub_model_id" not in convert(imported, save={**save, "push_to_hub": False})[0]


def test_masks_of_a_dataset(imported):
    folder = {"folder_path": "nowhere", "default_caption": "a cat"}
    masked = {**folder, "mask_path": "masks", "invert_mask": True, "mask_min_value": 0.25}
    values, left, _ = convert(imported, datasets=[masked, {**folder, "alpha_mask": True, "mask_min_value": 0.25}])
    keys = ("mask_path", "mask_invert", "alpha_mask")
    assert [[each.get(key) for key in keys] for each in values["datasets"]] == [["masks", True, None], [None, None, True]]
    assert (values["mask_floor"], left.keys()) == (0.25, OFF)
    assert "mask_floor" not in convert(imported)[0]
    values, left, _ = convert(imported, datasets=[masked, {**masked, "mask_min_value": 0.5}], train__inverted_mask_prior=True)
    assert (values["mask_floor"], values["prior_outside_mask"]) == (0.25, 0.5)
    assert "mask_floor is one for all datasets here" in left["config.json: datasets[1].mask_min_value"].why


def test_what_is_preserved_is_imported(imported):
    given = {
        "diff_output_preservation": True,
        "diff_output_preservation_class": "cat",
        "diff_output_preservation_multiplier": 0.5,
    }
    values, left, _ = convert(imported, **{f"train__{key}": value for key, value in given.items()})
    assert [values[name] for name in ("preserve", "preserve_class", "preserve_weight")] == ["class", "cat", 0.5]
    assert left.keys() == OFF
    values, left, _ = convert(imported, train__blank_prompt_preservation=True)
    assert (values["preserve"], "preserve_weight" in values, left.keys()) == ("blank", False, OFF)
    assert "preserve" not in convert(imported, train__diff_output_preservation=False)[0]


def test_denoising_steps_become_noise_levels(imported):
    values, left, _ = convert(
        imported, train__timestep_type="linear", train__min_denoising_steps=200, train__max_denoising_steps=900
    )
    assert (values["timestep_min"], values["timestep_max"], left.keys()) == (0.1, 0.8, OFF)
    values, _, _ = convert(imported, train__max_denoising_steps=500)
    assert (values["timestep_min"], "timestep_max" in values) == (0.5, False)
    values, _, _ = convert(imported, train__min_denoising_steps=159)
    assert values["timestep_max"] == pytest.approx(0.7308, abs=2e-3)  # a standard deviation above the middle
    values, left, _ = convert(imported, train__timestep_type="weighted", train__min_denoising_steps=200)
    assert "timestep_max" not in values
    assert "config.json: train.min_denoising_steps" in left
    assert "timestep_min" not in convert(imported, train__min_denoising_steps=0, train__max_denoising_steps=999)[0]


def test_a_slider_of_prompts_is_imported_with_its_anchor(imported):
    slider = {"positive_prompt": "old", "negative_prompt": "young", "guidance_strength": 2.5, "anchor_class": "a tree"}
    given = {**slider, "anchor_strength": 0.5, "target_class": "person"}
    values, left, _ = convert(imported, type="concept_slider", slider=given)
    names = (
        "slider",
        "slider_positive",
        "slider_negative",
        "slider_guidance",
        "preserve",
        "preserve_prompts",
        "preserve_weight",
    )
    assert [values[name] for name in names] == ["prompts", "old", "young", 2.5, "prompts", ["a tree"], 0.25]
    assert left.keys() == {*OFF, "config.json: slider.target_class"}
    assert 'instance_prompt = "person"' in left["config.json: slider.target_class"].fix
    values = convert(imported, type="concept_slider", slider={**slider, "anchor_class": ""})[0]
    assert [values.get(name) for name in names[4:]] == ["blank", None, 0.5]
    assert "preserve" not in convert(imported, type="concept_slider", slider={**slider, "anchor_class": None})[0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, (True, None, None)),
        ({"use_text_encoder_2": False}, (True, None, 0)),
        ({"use_text_encoder_1": False}, (True, 0, 1e-4)),
        ({"use_text_encoder_1": False, "use_text_encoder_2": False}, (None, None, None)),
    ],
)
def test_text_encoders_of_sdxl_are_trained_at_the_rate_of_the_run(imported, model, expected):
    """Whatever the keys of the other rates say."""
    rates = {"lr": 1e-4, "unet_lr": 2e-4, "text_encoder_lr": 3e-4, "train_text_encoder": True, "dtype": "bf16"}
    values, left, _ = convert(imported, model={"name_or_path": "x", "is_xl": True, **model}, train=rates)
    names = ("train_text_encoder", "text_encoder_lr", "text_encoder_2_lr")
    assert (tuple(values.get(name) for name in names), values["learning_rate"]) == (expected, 1e-4)
    assert {"fc1", "fc2"} <= set(values["lora_targets"]) or not expected[0]
    assert not any("text_encoder" in place or "unet_lr" in place for place in left)
    _, left, _ = convert(imported, train={**rates})
    assert [place for place in left if "text_encoder" in place] == ["config.json: train.train_text_encoder"]
