"""Configurations, concepts and samples of OneTrainer."""

import json

import pytest

CONFIG = {
    "model_type": "FLUX_DEV_1",
    "training_method": "LORA",
    "base_model_name": "flux",
    "gradient_accumulation_steps": 4,
    "train_dtype": "BFLOAT_16",
    "prior": {"weight_dtype": "NFLOAT_4", "learning_rate": 2e-4},
    "learning_rate": 1e-4,
    "timestep_distribution": "LOGIT_NORMAL",
    "noising_weight": 0.5,
    "noising_bias": 0.25,
    "timestep_shift": 3.0,
    "ema": "CPU",
    "save_every": 100,
    "save_every_unit": "STEP",
    "secrets": {"huggingface_token": "hf_secret"},
}
SECRET = {"config.json: secrets.huggingface_token"}
CONCEPT = {"path": "cats", "balancing": 3.0, "image": {"enable_random_flip": False}, "text": {"prompt_source": "sample"}}


def convert(imported, concepts=(CONCEPT,), **changes):
    return imported({"config.json": json.dumps({**CONFIG, **changes}), "concepts.json": json.dumps(list(concepts))})


def test_numbers_in_other_units_are_converted(imported):
    values, left, text = convert(imported)
    expected = {
        "model_family": "flux",
        "model_type": "lora",
        "learning_rate": 2e-4,  # of the part that is trained
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 50,  # of 200 micro-batches, by default
        "checkpoint_step_interval": 25,
        "base_model_precision": "nf4-torchao",
        "flow_sigmoid_mean": 0.25,
        "flow_sigmoid_scale": 1.5,
        "flow_schedule_shift": 3.0,
        "use_ema": True,
        "ema_device": "cpu",
        "ema_decay": pytest.approx(0.999 ** (1 / 5)),
        "num_train_epochs": 100,
        "lora_alpha": 1.0,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert (values["datasets"][0]["repeats"], left.keys()) == (2, SECRET)
    assert "hf_secret" not in text


def test_several_sizes_are_several_datasets_of_a_shorter_run(imported):
    values = convert(imported, resolution="512,768x1024", epochs=20)[0]
    assert [each["resolution"] for each in values["datasets"]] == [[512, 887]]
    assert values["num_train_epochs"] == 10


def test_older_files_without_tables_are_read(imported):
    old = {"optimizer": "ADAMW", "weight_decay": 0.05, "train_text_encoder": False, "unet_weight_dtype": "NONE"}
    values, left, _ = convert(imported, **old, weight_dtype="FLOAT_16", prior={})
    assert (values["optimizer"], values["adam_weight_decay"], values["lora_base_dtype"]) == ("adamw", 0.05, "bf16")
    assert left.keys() == SECRET


ENCODERS = {
    "by default": ({}, {}, (True, None, None), 0.3),
    "at a step": ({"stop_training_after_unit": "STEP"}, {"train": False}, (True, None, 0), 7),
    "apart": ({"stop_training_after": 5}, {}, (True, None, None), "listed"),
    "by the clock": ({"stop_training_after_unit": "MINUTE"}, {"train": False}, (True, None, 0), "listed"),
    "to the end": (
        {"stop_training_after_unit": "NEVER", "learning_rate": 1e-5},
        {"stop_training_after": 100, "learning_rate": 2e-5},
        (True, 1e-5, 2e-5),
        None,
    ),
    "the first": ({"stop_training_after": 5}, {"train": False}, (True, None, 0), 0.05),
    "the second": ({"train": False}, {"stop_training_after": 100, "learning_rate": 2e-5}, (True, 0, 2e-5), None),
    "none": ({"train": False}, {"train": False}, (None, None, None), None),
}


@pytest.mark.parametrize("given", ENCODERS)
def test_text_encoders_of_sdxl_are_trained_at_their_rates(imported, given):
    first, second, expected, stop = ENCODERS[given]
    model = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "text_encoder": first, "text_encoder_2": second}
    model["text_encoder_3"] = {"train": True}
    values, left, _ = convert(imported, **model, prior={})
    assert tuple(values.get(key) for key in ("train_text_encoder", "text_encoder_lr", "text_encoder_2_lr")) == expected
    assert values.get("train_text_encoder_frac", values.get("train_text_encoder_steps")) == (None if stop == "listed" else stop)
    assert any("text_encoder" in place for place in left) == (stop == "listed")


@pytest.mark.parametrize("model", ["STABLE_DIFFUSION_15", "STABLE_DIFFUSION_20", "STABLE_DIFFUSION_21_BASE"])
def test_sd_has_one_text_encoder_which_is_trained_by_default(imported, model):
    settings = {"text_encoder": {"learning_rate": 1e-5}, "text_encoder_2": {"train": True}, "text_encoder_layer_skip": 1}
    values, left, _ = convert(imported, model_type=model, **settings, prior={}, layer_filter="attentions")
    found = [values.get(key) for key in ("train_text_encoder", "text_encoder_lr", "text_encoder_2_lr", "clip_skip")]
    assert (values["model_family"], found) == ("sd1x" if model.endswith("15") else "sd2x", [True, 1e-5, None, 1])
    assert values["lora_targets"] == [".*attentions.*", "fc1", "fc2"]
    assert not [place for place in left if "text_encoder" in place]


def test_complete_text_encoders_are_not_trained_here(imported):
    model = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "FINE_TUNE"}
    values, left, _ = convert(imported, **model)
    assert "train_text_encoder" not in values
    assert [place for place in left if "text_encoder.train" in place]


@pytest.mark.parametrize(("image", "probability"), [({}, None), ({"enable_random_flip": True}, 0.5)])
def test_images_are_mirrored_only_where_that_was_switched_on(imported, image, probability):
    values, _, _ = convert(imported, [{"path": "cats", "enabled": True, "image": image}])
    assert values["datasets"][0].get("flip_probability") == probability


def test_what_is_done_with_tags_becomes_keys_of_the_dataset(imported):
    text = {"enable_tag_shuffling": True, "keep_tags_count": 2, "tag_delimiter": ",", "tag_dropout_enable": True}
    dropped = {**text, "tag_dropout_mode": "RANDOM", "tag_dropout_probability": 0.1}
    values, left, _ = convert(imported, [{**CONCEPT, "text": text}, {**CONCEPT, "text": dropped}])

    assert [each["caption_shuffle"] for each in values["datasets"]] == [{"position_start": 2}] * 2
    assert [each.get("caption_tag_dropout_rate") for each in values["datasets"]] == [None, 0.1]
    assert [place for place in left if "tag" in place] == ["default of OneTrainer: text.tag_dropout_mode"]


def test_concepts_that_are_off_are_left_out_and_those_for_validation_are_held_out(imported):
    rows = [{**CONCEPT, "enabled": False}, {**CONCEPT, "path": "more", "validation_concept": True}]
    values, left, _ = convert(imported, rows)
    assert [(each["id"], each["dataset_type"]) for each in values["datasets"]] == [("more", "eval")]
    assert [place for place in left if "enabled" in place]


def test_the_kind_of_a_concept_is_kept(imported):
    rows = [{**CONCEPT, "path": kind.lower(), "type": kind} for kind in ("STANDARD", "VALIDATION", "PRIOR_PREDICTION")]
    values, left, _ = convert(imported, rows)
    kinds = {each["id"]: (each.get("dataset_type"), each.get("is_regularisation_data")) for each in values["datasets"]}
    assert kinds == {"standard": (None, None), "validation": ("eval", None), "prior_prediction": (None, True)}
    assert left.keys() == SECRET


def test_the_weight_of_a_concept_is_that_of_its_images(imported):
    values, left, _ = convert(imported, [{**CONCEPT, "loss_weight": 0.5}, {**CONCEPT, "path": "more", "loss_weight": 1.0}])
    assert [each.get("loss_weight") for each in values["datasets"]] == [0.5, None]
    assert left.keys() == SECRET


@pytest.mark.parametrize(
    ("distribution", "shift", "expected"), [("UNIFORM", 1.0, 0.2), ("UNIFORM", 3.0, 3 / 7), ("LOGIT_NORMAL", 1.0, None)]
)
def test_a_range_of_uniform_timesteps_is_one_of_noise_levels(imported, distribution, shift, expected):
    changes = {"timestep_distribution": distribution, "timestep_shift": shift, "max_noising_strength": 1.0}
    values, left, _ = convert(imported, **changes, min_noising_strength=0.2)
    assert values.get("timestep_min") == (None if expected is None else pytest.approx(expected, abs=1e-6))
    assert ("config.json: min_noising_strength" in left, "timestep_max" in values) == (expected is None, False)


@pytest.mark.parametrize(
    ("model", "shift", "dynamic", "expected"),
    [
        ("STABLE_DIFFUSION_XL_10_BASE", 3.0, True, (3.0, None, 3 / 7)),
        ("STABLE_DIFFUSION_XL_10_BASE", 1.0, False, (None, None, 0.2)),
        ("STABLE_DIFFUSION_35", 2.0, True, (2.0, None, 1 / 3)),
        ("FLUX_DEV_1", 2.0, True, (None, True, None)),
    ],
)
def test_the_shift_of_timesteps_comes_after_their_range_in_models_that_predict_noise_too(
    imported, model, shift, dynamic, expected
):
    shifts = {"timestep_shift": shift, "dynamic_timestep_shifting": dynamic}
    values, _, _ = convert(imported, model_type=model, timestep_distribution="UNIFORM", **shifts, min_noising_strength=0.2)
    found = [values.get(name) for name in ("flow_schedule_shift", "flow_schedule_auto_shift", "timestep_min")]
    assert found == [each if not isinstance(each, float) else pytest.approx(each, abs=1e-6) for each in expected]


KINDS = {
    "loha": {"peft_type": "LOHA"},
    "dora": {"lora_decompose": True, "lora_decompose_output_axis": True},
    None: {"peft_type": "LORA", "lora_decompose": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_adapter_is_kept_where_it_is_the_same(imported, kind):
    values, left, _ = convert(imported, **KINDS[kind])
    assert values.get("lora_kind") == kind
    assert left.keys() - SECRET == (set() if kind else {"config.json: lora_decompose"})


def test_a_preset_keeps_its_resolution_for_the_datasets_that_are_added_to_it(imported):
    preset = {"model_type": "Z_IMAGE", "training_method": "LORA", "resolution": "512", "aspect_ratio_bucketing": False}
    values, left, _ = imported({"preset.json": json.dumps(preset)})
    assert [values[key] for key in ("resolution", "resolution_type", "crop_aspect")] == [512, "pixel_area", "square"]
    assert left.keys() == {"concepts"}


@pytest.mark.parametrize("scheduler", ["COSINE", "REX"])
def test_a_schedule_that_is_not_there_keeps_its_warmup(imported, scheduler):
    values, left, _ = convert(imported, learning_rate_scheduler=scheduler, learning_rate_min_factor=0.1)
    assert (values["lr_warmup_steps"], values["lr_end_ratio"]) == (50, 0.1)
    assert ("config.json: learning_rate_scheduler" in left, "lr_scheduler" in values) == (
        scheduler == "REX",
        scheduler != "REX",
    )


def test_masked_training_has_masks_beside_the_images_and_their_weights(imported):
    masked = {"masked_training": True, "unmasked_weight": 0.2, "unmasked_probability": 0.25, "normalize_masked_area_loss": True}
    values, left, _ = convert(imported, **masked, masked_prior_preservation_weight=0.5)
    expected = {"mask_floor": 0.2, "mask_probability": 0.75, "mask_normalise": True, "prior_outside_mask": 0.5}
    assert {key: values.get(key) for key in expected} == expected
    assert (values["datasets"][0]["mask_suffix"], left.keys()) == ("-masklabel.png", SECRET)

    values, left, _ = convert(imported, **{**masked, "masked_training": False})
    assert not expected.keys() & values.keys()
    assert "mask_suffix" not in values["datasets"][0]
    assert left.keys() - SECRET == {f"config.json: {key}" for key in masked.keys() - {"masked_training"}}
