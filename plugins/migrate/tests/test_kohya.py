"""Files of kohya's sd-scripts: what they become, and what is listed."""

import json

import pytest

from smalti_migrate.importing import import_files

TRAIN = """
pretrained_model_name_or_path = "flux1-dev.safetensors"
network_module = "networks.lora_flux"
network_dim = 32
output_dir = "out"
output_name = "zwx"
max_train_epochs = 10
unet_lr = 2e-4
learning_rate = 1e-3
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.95"]
mixed_precision = "fp16"
noise_offset = 0.1
flip_aug = false
wandb_api_key = "top-secret"
"""
DATASET = """
[general]
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
resolution = [768, 1024]
batch_size = 4
[[datasets.subsets]]
image_dir = "photos/zwx cat"
num_repeats = 10
[[datasets.subsets]]
image_dir = 'C:\\more\\zwx cat'
flip_aug = true
[[datasets.subsets]]
image_dir = "reg"
is_reg = true
"""


def test_options_and_datasets_become_one_file_with_the_place_of_every_value(imported):
    values, left, text = imported({"train.toml": TRAIN, "dataset.toml": DATASET})
    datasets = values.pop("datasets")
    assert values == {
        "output_dir": "out/zwx",
        "num_train_epochs": 10,
        "model_family": "flux",
        "model_type": "lora",
        "pretrained_model_name_or_path": "flux1-dev.safetensors",
        "train_batch_size": 4,
        "aspect_bucket_alignment": 64,
        "caption_dropout_probability": 0.0,
        "mixed_precision": "auto",
        "optimizer": "adamw8bit",
        "learning_rate": 2e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_weight_decay": 0.1,
        "lr_scheduler": "constant",
        "timestep_distribution": "uniform",
        "flow_schedule_shift": 3.0,
        "flux_guidance_value": 3.5,
        "lora_rank": 32,
        "lora_alpha": 1,
        "lora_targets": ["transformer_blocks.*", "single_transformer_blocks.*"],
    }
    assert datasets[0] == {
        "id": "zwx-cat",
        "instance_data_dir": "photos/zwx cat",
        "repeats": 9,
        "caption_strategy": "textfile",
        "resolution": 887,
        "resolution_type": "pixel_area",
    }
    found = [(each["id"], each["instance_data_dir"], each["flip_probability"]) for each in datasets[1:]]
    assert found == [("zwx-cat-2", "C:\\more\\zwx cat", 0.5)]
    assert left.keys() == {
        "train.toml: wandb_api_key",
        "train.toml: noise_offset",
        "default of kohya's sd-scripts: network_train_unet_only",
        "default of kohya's sd-scripts: model_prediction_type",
        "dataset.toml: datasets[0].subsets[2].is_reg",
    }
    assert "repeats = 9 # dataset.toml: datasets[0].subsets[0].num_repeats = 10; repeats counts additional visits\n" in text
    assert "lora_alpha = 1 # default of kohya's sd-scripts: network_alpha = 1\n" in text
    assert "# - train.toml: noise_offset = 0.1\n" in text
    assert "top-secret" not in text


SAMPLING = {
    "timestep_sampling='sigmoid'\nsigmoid_scale=2.0": ("logit_normal", 1, 2.0),
    "timestep_sampling='shift'\ndiscrete_flow_shift=3.1582": ("logit_normal", 3.1582, None),
    "timestep_sampling='flux_shift'": ("logit_normal", None, None),
    "timestep_sampling='uniform'": ("uniform", 1, None),
    "weighting_scheme='logit_normal'\nlogit_std=0.5": ("logit_normal", 3.0, 0.5),
    "weighting_scheme='mode'": ("mode", 3.0, None),
}


@pytest.mark.parametrize("keys", SAMPLING)
def test_timesteps_of_flux_are_sampled_and_shifted_as_there(imported, keys):
    values = imported({"train.toml": f"network_module='networks.lora_flux'\nnetwork_dim=4\n{keys}"})[0]
    found = values["timestep_distribution"], values.get("flow_schedule_shift"), values.get("flow_sigmoid_scale")
    assert (found, values.get("flow_schedule_auto_shift", False)) == (SAMPLING[keys], "flux_shift" in keys)


@pytest.mark.parametrize(("sampler", "expected"), [("k_euler_a", "euler-a"), ("dpmsolver++", "dpm++"), ("pndm", None)])
def test_samplers_become_schedulers_of_validation_images(imported, sampler, expected):
    values, left, _ = imported(
        {"train.toml": f"network_module='networks.lora'\nnetwork_dim=4\nsample_sampler='{sampler}'"}, "sdxl"
    )
    assert values.get("validation_noise_scheduler") == expected
    assert ("train.toml: sample_sampler" in left) == (expected is None)


def test_a_command_line_gives_the_family_and_goes_before_the_file_that_it_names(imported, write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write("base.toml", "[network]\nnetwork_dim = 8\nlearning_rate = 1e-3\nsave_every_n_steps = 100")
    write("words.txt", "a cat --w 640 --h 960 --s 12\na dog --w 640 --h 960 --s 12 --n ugly")
    script = "OUT=/runs\naccelerate launch --num_processes 2 sdxl_train_network.py --config_file base.toml \\\n"
    script += '  --learning_rate 5e-5 --output_dir "$OUT" --save_last_n_steps=350 --sample_prompts=words.txt \\\n'
    script += "  --network_module networks.lora"
    values, left, _ = imported({"run.sh": script})
    assert {key: values[key] for key in ("model_family", "lora_rank", "learning_rate", "num_processes", "output_dir")} == {
        "model_family": "sdxl",
        "lora_rank": 8,
        "learning_rate": 5e-5,
        "num_processes": 2,
        "output_dir": "/runs",
    }
    assert (values["checkpoint_step_interval"], values["checkpoints_total_limit"], values["max_train_steps"]) == (100, 3, 1600)
    assert (values["validation_prompt"], values["validation_resolution"]) == (["a cat", "a dog"], "640x960")
    assert (values["validation_num_inference_steps"], values["validation_negative_prompt"]) == (12, "ugly")
    assert "datasets" in left, "no images are named"


def test_folders_with_repeats_become_datasets_as_their_files_say(imported, tmp_path):
    for folder, files in {"10_zwx cat": ["1.png"], "3_style": ["1.png", "1.txt"], "notes": []}.items():
        (tmp_path / "images" / folder).mkdir(parents=True)
        for name in files:
            (tmp_path / "images" / folder / name).touch()
    keys = f"train_data_dir = '{tmp_path / 'images'}'\nnetwork_dim = 4\nresolution = '512,512'\ncaption_extension = '.txt'"
    values, left, _ = imported({"train.toml": keys}, "sdxl")
    assert [(each["id"], each["repeats"], each["caption_strategy"]) for each in values["datasets"]] == [
        ("10_zwx-cat", 9, "instanceprompt"),
        ("3_style", 2, "textfile"),
    ]
    assert values["datasets"][0]["instance_prompt"] == "zwx cat"
    assert [each["crop_aspect"] for each in values["datasets"]] == ["square", "square"]  # buckets are off by default there
    assert (values["datasets"][1]["instance_prompt"], values["datasets"][1]["instance_prompt_fallback"]) == ("style", True)
    assert "class_tokens" not in "".join(left)


def test_caption_files_keep_their_extension_and_class_tokens_are_for_images_without_one(imported):
    subset = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\nclass_tokens = 'zwx cat'\ncaption_extension = '.cap'"
    with_prefix = f"{subset}\ncaption_prefix = 'photo of'"
    values, left, _ = imported({"train.toml": TRAIN, "dataset.toml": subset})
    prefixed, also_left, _ = imported({"train.toml": TRAIN, "dataset.toml": with_prefix})
    keys = ("caption_strategy", "caption_extension", "instance_prompt", "instance_prompt_fallback", "caption_prefix")

    assert [values["datasets"][0].get(key) for key in keys] == ["textfile", ".cap", "zwx cat", True, None]
    assert [prefixed["datasets"][0].get(key) for key in keys] == ["textfile", ".cap", "zwx cat", True, "photo of"]
    assert also_left.keys() == left.keys()


def test_what_is_done_with_tags_becomes_keys_of_the_dataset(imported):
    shared = "[general]\nshuffle_caption = true\ncaption_separator = ';'\ncaption_suffix = 'x'\n[[datasets]]\n"
    first = "[[datasets.subsets]]\nimage_dir = 'a'\nkeep_tokens = 2\ncaption_dropout_rate = 0.2\n"
    second = "[[datasets.subsets]]\nimage_dir = 'b'\nshuffle_caption = false\ncaption_tag_dropout_rate = 0.3\n"
    (one, other), left = (
        imported({"train.toml": TRAIN, "dataset.toml": shared + first + second})[0]["datasets"],
        imported({"train.toml": TRAIN, "dataset.toml": shared + first})[1],
    )

    assert one["caption_shuffle"] == {"position_start": 2, "split_on": ";"}
    assert (one["caption_suffix"], one["caption_dropout_probability"], one.get("caption_tag_dropout_rate")) == ("x", 0.2, None)
    assert other["caption_shuffle"] == {"enable": False, "split_on": ";"}
    assert (other["caption_tag_dropout_rate"], other.get("caption_dropout_probability")) == (0.3, None)
    assert not [place for place in left if "caption" in place]


def test_a_learning_rate_of_an_optimizer_that_is_not_there_is_not_taken_over(imported):
    values, left, _ = imported({"train.toml": "network_dim=4\noptimizer_type='DAdaptAdam'\nlearning_rate=1.0"}, "sdxl")
    assert (values.keys() & {"optimizer", "learning_rate"}, left["train.toml: optimizer_type"].value) == (set(), "DAdaptAdam")


ADAFACTOR = {
    "": (None, None),
    "'relative_step=False'": ("adafactor_scaled", 0.0),
    "'relative_step=False', 'scale_parameter=False', 'warmup_init=False'": ("adafactor", 0.0),
    "'relative_step=False', 'scale_parameter=False', 'weight_decay=0.1'": ("adafactor", 0.1),
}


@pytest.mark.parametrize("arguments", ADAFACTOR)
def test_adafactor_is_the_one_that_its_arguments_describe(imported, arguments):
    keys = f"network_dim=4\noptimizer_type='AdaFactor'\nlearning_rate=1e-3\noptimizer_args=[{arguments}]"
    values, left, _ = imported({"train.toml": keys}, "sdxl")
    assert (values.get("optimizer"), values.get("adam_weight_decay")) == ADAFACTOR[arguments]
    assert ("train.toml: optimizer_type" in left, "learning_rate" in values) == (not arguments, bool(arguments))


@pytest.mark.parametrize(("limit", "clip"), [("", 1.0), ("max_grad_norm=0", 0), ("max_grad_norm=0.5", 0.5)])
def test_weights_in_bf16_and_a_fused_backward_pass_are_options_where_all_weights_train(imported, limit, clip):
    keys = f"output_name='x'\nmin_bucket_reso=256\n{limit}\nfull_bf16=true\nfused_backward_pass=true\nmixed_precision='bf16'"
    values, left, _ = imported({"train.toml": keys}, "sdxl")
    updates = {name: values.get(name) for name in ("weights_dtype", "release_gradients", "release_clip_norm", "max_grad_norm")}
    assert updates == {"weights_dtype": "bf16", "release_gradients": True, "release_clip_norm": clip, "max_grad_norm": 0}
    assert not [place for place in left if "full_bf16" in place or "fused" in place or "grad_norm" in place]
    values, left, _ = imported({"train.toml": f"network_dim=4\nnetwork_module='networks.lora'\n{keys}"}, "sdxl")
    assert not values.keys() & {"weights_dtype", "release_gradients", "release_clip_norm"}
    assert {"train.toml: full_bf16", "train.toml: fused_backward_pass"} <= left.keys()


def test_the_threshold_of_huber_losses_depends_on_the_noise_level_unless_the_file_says_otherwise(imported):
    found = [
        imported({"train.toml": f"network_dim=4\nnetwork_module='networks.lora'\nloss_type='huber'\n{keys}"}, "sdxl")[0][
            "huber_schedule"
        ]
        for keys in ("", "huber_schedule='exponential'", "huber_schedule='constant'")
    ]
    assert found == ["snr", "exponential", "constant"]


def test_a_model_that_is_not_known_has_to_be_named(imported):
    left = imported({"train.toml": "network_module='networks.lora'\nnetwork_dim=4"})[1]
    assert left["model_family"].fix == "smalti config import FILE --model_family=sdxl"


def test_files_of_the_same_name_as_the_options_that_they_hold_are_not_overwritten(everything, write):
    path = write("train.toml", TRAIN)
    import_files([path], everything)
    assert path.read_text() == TRAIN


PRESET = {
    "LoRA_type": "Standard",
    "sdxl": True,
    "flux1_checkbox": False,
    "pretrained_model_name_or_path": "sdxl.safetensors",
    "network_dim": 32,
    "network_alpha": 16,
    "optimizer": "AdamW8bit",
    "optimizer_args": "weight_decay=0.05",
    "learning_rate": 0.0001,
    "unet_lr": 0.0,
    "epoch": 8,
    "max_train_steps": 0,
    "lr_scheduler": "cosine",
    "lr_warmup": 0,
    "max_resolution": "1024,1024",
    "min_snr_gamma": 0,
    "guidance_scale": 3.5,
    "timestep_sampling": "sigma",
    "noise_offset_type": "Original",
    "sample_prompts": "a cat --w 512 --h 768 --s 20\na dog --w 512 --h 768 --s 20",
    "LyCORIS_preset": "full",
}


def test_a_preset_of_kohyas_gui_has_options_where_its_fields_are_used(imported):
    values, left, _ = imported({"preset.json": json.dumps(PRESET)})
    expected = {"model_family": "sdxl", "num_train_epochs": 8, "learning_rate": 1e-4, "lora_rank": 32, "lora_alpha": 16}
    expected |= {"optimizer": "adamw8bit", "adam_weight_decay": 0.05, "lr_scheduler": "cosine"}
    expected |= {"validation_prompt": ["a cat", "a dog"], "validation_resolution": "512x768"}
    assert {key: values.get(key) for key in expected} == expected
    assert values.keys() & {"snr_gamma", "flux_guidance_value", "timestep_distribution", "max_train_steps"} == set()
    assert list(left) == ["datasets"]
    assert (values["train_text_encoder"], values["lora_targets"]) == (True, ["attentions.*", "fc1", "fc2"])


RATES = {
    "": (True, None),
    "text_encoder_lr=5e-5": (True, 5e-5),
    "text_encoder_lr=[5e-5, 5e-5]": (True, 5e-5),
    "unet_lr=2e-4\nlearning_rate=1e-4": (True, 1e-4),
    "text_encoder_lr=0": (None, None),
    "text_encoder_lr=[5e-5, 1e-5]": (True, 5e-5),
    "text_encoder_lr=[0, 1e-5]": (None, None),
    "text_encoder_lr=5e-5\nnetwork_train_unet_only=true": (None, None),
}


@pytest.mark.parametrize("given", RATES)
def test_text_encoders_of_sdxl_are_trained_at_their_rate(imported, given):
    text = f"network_module='networks.lora'\nnetwork_dim=4\nmax_train_steps=9\n{given}\n"
    values, left, _ = imported({"train.toml": text}, family="sdxl")
    assert (values.get("train_text_encoder"), values.get("text_encoder_lr")) == RATES[given]
    assert "train.toml: text_encoder_lr" not in left
    values, left, _ = imported({"train.toml": text.replace("networks.lora", "networks.lora_flux")}, family="flux")
    assert "train_text_encoder" not in values


SCRIPTS = {
    "train_network.py --network_module=networks.lora --clip_skip=2": ("sd1x", "lora", 1, True),
    "train_network.py --network_module=networks.lora --v2 --network_train_unet_only": ("sd2x", "lora", None, None),
    "train_db.py": ("sd1x", "full", None, None),
    "flux_train_network.py --network_module=networks.lora_flux --model_type=chroma": ("chroma", "lora", None, None),
    "anima_train.py": ("anima", "full", None, None),
}


@pytest.mark.parametrize("words", SCRIPTS)
def test_a_script_and_its_options_say_the_family(imported, words):
    values, left, _ = imported({"run.sh": f"accelerate launch {words} --model_prediction_type=raw --apply_t5_attn_mask"})
    keys = ("model_family", "model_type", "clip_skip", "train_text_encoder")
    assert tuple(values.get(key) for key in keys) == SCRIPTS[words]
    assert ("run.sh: --apply_t5_attn_mask" in left) == (values["model_family"] != "chroma")
    assert not [place for place in left if "model_type" in place or "v2" in place]


def test_the_range_of_timesteps_is_that_of_noise_levels(imported):
    text = "network_module='networks.lora'\nnetwork_dim=4\nmax_train_steps=9\nmin_timestep=0\nmax_timestep=600\n"
    values, left, _ = imported({"train.toml": text}, family="sdxl")
    assert (values.get("timestep_min"), values["timestep_max"]) == (None, 0.6)
    assert not any("timestep" in place for place in left)
    text = text.replace("networks.lora", "networks.lora_flux").replace("=0\n", "=200\n")
    values, left, _ = imported({"train.toml": text}, family="flux")
    assert values.keys() & {"timestep_min", "timestep_max"} == set()
    assert [left[f"train.toml: {key}_timestep"].fix.partition(",")[0] for key in ("min", "max")] == [
        "timestep_min",
        "timestep_max",
    ]


def test_a_repository_on_the_hub_is_private_unless_it_was_public(imported):
    keys = "network_dim=4\nunet_lr=1e-4\nhuggingface_repo_id='me/zwx'\n"
    values = imported({"train.toml": keys})[0]
    assert (values["push_to_hub"], values["hub_model_id"], values.get("hub_private", True)) == (True, "me/zwx", True)
    assert imported({"train.toml": keys + "huggingface_repo_visibility='public'"})[0]["hub_private"] is False


def test_a_preset_keeps_what_it_says_of_datasets_or_lists_it(imported):
    data = {"bucket_no_upscale": True, "color_aug": True, "shuffle_caption": True, "keep_tokens": "2", "enable_bucket": True}
    values, left, _ = imported({"preset.json": json.dumps({**PRESET, **data, "max_resolution": "512,512"})})
    assert [values[key] for key in ("resolution", "resolution_type")] == [512, "pixel_area"]
    assert "crop_aspect" not in values
    assert {place.partition(": ")[2] for place in left} >= data.keys() - {"enable_bucket"}


def test_a_preset_gives_what_it_says_of_datasets_to_the_folders_that_it_names(imported, tmp_path):
    (tmp_path / "images" / "10_cat").mkdir(parents=True)
    data = {"train_data_dir": str(tmp_path / "images"), "bucket_no_upscale": True, "shuffle_caption": True, "keep_tokens": 2}
    values, left, _ = imported({"preset.json": json.dumps({**PRESET, **data})})
    assert values["datasets"][0]["caption_shuffle"] == {"position_start": 2}
    assert "preset.json: bucket_no_upscale" in left
    assert not any("keep_tokens" in place for place in left)


def test_additional_parameters_of_a_preset_override_its_fields(imported):
    more = '--max_grad_norm=0 --learning_rate 5e-5 --network_train_unet_only --lr_scheduler_type "CosineAnnealingLR" '
    more += '--lr_scheduler_args "T_max=1000" "eta_min=0"'
    arguments = '"weight_decay=0.1" "betas=0.9,0.95"'
    preset = {**PRESET, "additional_parameters": more, "optimizer_args": arguments}
    values, left, _ = imported({"preset.json": json.dumps(preset)})
    assert [values[key] for key in ("max_grad_norm", "learning_rate", "adam_weight_decay")] == [0, 5e-5, 0.1]
    assert [values[key] for key in ("adam_beta1", "adam_beta2")] == [0.9, 0.95]
    assert left["preset.json: additional_parameters --lr_scheduler_args"].value == ["T_max=1000", "eta_min=0"]
    assert not any("network_train_unet_only" in place for place in left)


def test_what_goes_with_a_schedule_that_is_not_there_is_kept_or_listed(imported):
    keys = "network_dim=4\nunet_lr=1e-4\nlr_scheduler='cosine_with_restarts'\nlr_scheduler_num_cycles=3\nlr_warmup_steps=100\n"
    keys += "lr_scheduler_min_lr_ratio=0.1\nlr_scheduler_power=2\nlr_decay_steps=50"
    values, left, _ = imported({"train.toml": keys}, "sdxl")
    assert [values[key] for key in ("lr_warmup_steps", "lr_end_ratio", "lr_power")] == [100, 0.1, 2]
    assert {"train.toml: lr_scheduler", "train.toml: lr_decay_steps"} <= left.keys()


@pytest.mark.parametrize("family", ["flux", "pixart"])
def test_lora_of_convolutions_is_said_to_be_of_sdxl_only(imported, family):
    left = imported({"train.toml": "network_dim=4\nnetwork_module='networks.lora'\nnetwork_args=['conv_dim=16']"}, family)[1]
    assert "LoRA of convolutions" in left["train.toml: network_args conv_dim"].why


@pytest.mark.parametrize(
    ("arguments", "ratio"),
    [
        ("loraplus_lr_ratio=16", 16),
        ("loraplus_lr_ratio=16', 'loraplus_unet_lr_ratio=4", 4),
        ("loraplus_lr_ratio=0", None),
        ("loraplus_text_encoder_lr_ratio=2", None),
    ],
)
def test_the_ratio_of_rates_of_lora_plus_is_that_of_the_model(imported, arguments, ratio):
    """Of an SDXL model whose text encoders are trained at another one, that is listed."""
    values, left, _ = imported({"train.toml": f"network_dim=4\nnetwork_module='networks.lora'\nnetwork_args=['{arguments}']"})
    assert values.get("loraplus_lr_ratio") == ratio
    assert not any("loraplus" in place for place in left)
    preset = {**PRESET, **dict(each.split("=") for each in arguments.split("', '"))}
    values, left, _ = imported({"preset.json": json.dumps(preset)})
    assert values.get("loraplus_lr_ratio") == ratio
    assert any("loraplus_text_encoder_lr_ratio" in place for place in left) == (ratio == 4 or "text" in arguments)


def test_one_caption_dropout_of_all_datasets_is_the_option(imported):
    data = "[general]\ncaption_dropout_rate = 0.3\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'"
    values, left, _ = imported({"train.toml": TRAIN, "dataset.toml": data})
    assert values["caption_dropout_probability"] == 0.3
    assert "dataset.toml: general.caption_dropout_rate" not in left


def test_what_a_dataset_file_has_beside_its_subsets_is_listed(imported):
    data = "extra = 1\n[general]\nkeep_tokens = 1\n[[datasets]]\nbatch_size = 2\n"
    places = imported({"train.toml": TRAIN, "dataset.toml": data + "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'"})[1]
    assert {f"dataset.toml: {key}" for key in ("extra", "general.keep_tokens", "datasets[0]")} <= places.keys()


def test_random_crops_of_cached_latents_are_drawn_once(imported):
    folder = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\nrandom_crop = true"
    found = [
        imported({"train.toml": f"{keys}{TRAIN}", "dataset.toml": folder})[0].get("vae_cache_disable")
        for keys in ("", "cache_latents = true\n")
    ]
    assert found == [True, None]


def test_masks_weight_the_loss_as_they_do_there(imported):
    general, masks = "[general]\n", 'conditioning_data_dir = "masks"\n'
    files = {"train.toml": f"{TRAIN}masked_loss = true", "dataset.toml": DATASET.replace(general, general + masks)}
    values, left, _ = imported(files)
    assert [(each["mask_path"], "alpha_mask" in each) for each in values["datasets"]] == [("masks", False)] * 2
    assert (values["mask_floor"], values["mask_normalise"]) == (0.0, False)
    assert not [place for place in left if "mask" in place or "conditioning" in place]

    both = DATASET.replace(general, f"{general}{masks}alpha_mask = true\n")
    values, left, _ = imported({"train.toml": TRAIN, "dataset.toml": both})
    assert [(each["alpha_mask"], "mask_path" in each) for each in values["datasets"]] == [(True, False)] * 2
    assert "dataset.toml: general.conditioning_data_dir" in left

    values, left, _ = imported({"train.toml": f"{TRAIN}masked_loss = true", "dataset.toml": DATASET})
    assert "mask_floor" not in values
    assert "train.toml: masked_loss" in left
