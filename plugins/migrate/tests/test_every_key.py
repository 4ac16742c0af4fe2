"""Whatever a file of another trainer says is in the comment of a line, or in the list of what was not converted."""

import json
import re

import pytest
from hypothesis import given, strategies as st

from smalti_migrate.commented_toml import as_toml
from smalti_migrate.importing import import_files
from smalti_migrate.rules import asks_for_nothing
from smalti_migrate.tables import PAGE

KOHYA, AI_TOOLKIT, ONETRAINER = PAGE


def nested(values):
    """Dotted keys as nested tables."""
    result = {}
    for key, value in values.items():
        *parts, last = key.split(".")
        table = result
        for part in parts:
            inner = table.setdefault(part, {})
            table[part] = table = inner if isinstance(inner, dict) else {}
        table[last] = value
    return result


def sd_scripts(options=(), *, row=(), general=(), prompt=()):
    data = {"general": dict(general), "datasets": [{"resolution": 512, "subsets": [{"image_dir": "cats", **dict(row)}]}]}
    files = {"train.json": {"network_dim": 4, "network_module": "networks.lora", **dict(options)}, "data.json": data}
    return files | {"prompts.json": [{"prompt": "a cat", **dict(prompt)}]}


def ai_toolkit(process=(), *, row=(), sample=()):
    start = {"type": "sd_trainer", "network.linear": 4, "model.arch": "flux"}
    rows = {"datasets": [{"folder_path": "cats", **dict(row)}], "sample.samples": [{"prompt": "a cat", **dict(sample)}]}
    return {"train.json": {"config": {"name": "x", "process": [nested({**start, **rows, **dict(process)})]}}}


def onetrainer(options=(), *, row=(), sample=()):
    start = {"model_type": "FLUX_DEV_1", "training_method": "LORA", "base_model_name": "x"}
    concepts, samples = (
        [nested({"path": "cats", "enabled": True, **dict(row)})],
        [{"prompt": "a cat", "cfg_scale": 1, **dict(sample)}],
    )
    return {"train.json": nested({**start, **dict(options)}), "concepts.json": concepts, "samples.json": samples}


FULL = {
    KOHYA: {
        "pretrained_model_name_or_path": "sdxl",
        "output_dir": "out",
        "output_name": "zwx",
        "max_train_steps": 100,
        "optimizer_type": "Adafactor",
        "optimizer_args": ["relative_step=False"],
        "lr_scheduler": "cosine_with_restarts",
        "lr_scheduler_num_cycles": 3,
        "lr_warmup_steps": 10,
        "unet_lr": 1e-4,
        "learning_rate": 1e-3,
        "mixed_precision": "bf16",
        "enable_bucket": True,
        "random_crop": True,
        "shuffle_caption": True,
        "keep_tokens": 2,
        "fp8_base": True,
        "save_every_n_steps": 10,
        "sample_every_n_steps": 10,
        "loss_type": "huber",
        "torch_compile": True,
    },
    AI_TOOLKIT: {
        "trigger_word": "zwx",
        "train.steps": 100,
        "train.gradient_accumulation_steps": 2,
        "train.lr": 1e-4,
        "train.unet_lr": 1e-3,
        "train.optimizer": "lion",
        "train.lr_scheduler": "step",
        "train.timestep_type": "shift",
        "train.ema_config.use_ema": True,
        "model.quantize": True,
        "save.push_to_hub": True,
        "save.hf_repo_id": "me/zwx",
        "sample.width": 640,
        "sample.walk_seed": True,
        "network.linear_alpha": 2,
        "network.conv": 4,
    },
    ONETRAINER: {
        "optimizer.optimizer": "ADAMW",
        "learning_rate_scheduler": "COSINE_WITH_RESTARTS",
        "ema": "GPU",
        "timestep_distribution": "LOGIT_NORMAL",
        "noising_bias": 0.5,
        "huber_strength": 1.0,
        "mse_strength": 0.0,
        "save_every": 10,
        "save_every_unit": "STEP",
        "rolling_backup": True,
        "multi_gpu": True,
        "device_indexes": "0,1",
        "layer_filter": "attn",
        "transformer.weight_dtype": "NFLOAT_4",
        "dynamic_timestep_shifting": True,
        "epochs": 20,
    },
}


def script(values=()):
    words = " ".join(f"--{key}={json.dumps(value)}" for key, value in dict(values).items())
    return {"run.sh": f"accelerate launch {words} sdxl_train_network.py --network_module=networks.lora --network_dim=4"}


def preset(values=()):
    return {"preset.json": {"LoRA_type": "Standard", "sdxl": True, "max_resolution": "512,512", **dict(values)}}


WAYS = {
    (KOHYA, "Options"): (sd_scripts, "options", "train.json: "),
    (KOHYA, "Datasets"): (sd_scripts, "row", "data.json: datasets[0].subsets[0]."),
    (KOHYA, "Prompts"): (sd_scripts, "prompt", "prompts.json: [0]."),
    (KOHYA, "Flags of accelerate launch"): (script, "values", "run.sh: accelerate launch --"),
    (KOHYA, "Fields of presets of the GUI"): (preset, "values", "preset.json: "),
    (AI_TOOLKIT, "Options"): (ai_toolkit, "process", "train.json: "),
    (AI_TOOLKIT, "Datasets"): (ai_toolkit, "row", "train.json: datasets[0]."),
    (AI_TOOLKIT, "Samples"): (ai_toolkit, "sample", "train.json: sample.samples[0]."),
    (ONETRAINER, "Options"): (onetrainer, "options", "train.json: "),
    (ONETRAINER, "Concepts"): (onetrainer, "row", "concepts.json: [0]."),
    (ONETRAINER, "Samples"): (onetrainer, "sample", "samples.json: [0]."),
}
"""Table -> the files with these values in it, the name of the argument, and the place of its keys."""
TABLES = [(trainer, title) for trainer, tables in PAGE.items() for title in tables]
SWITCHES = {
    *("network_train_unet_only", "cache_latents", "cache_latents_to_disk", "enable_bucket", "train.disable_sampling"),
    *("sample.walk_seed", "buckets", "aspect_ratio_bucketing", "enabled", "text.tag_dropout_enable"),
}
"""Keys that ask for what smalti does if they are on, which a number other than 0 says."""


def told(text, place):
    return re.search(rf"{re.escape(place)}(?![\w.])", text) is not None


@pytest.fixture(scope="module")
def convert(everything, tmp_path_factory):
    """convert({name: content}) -> the result, and the text of its file."""
    folder = tmp_path_factory.mktemp("files")

    def give(files):
        for name, content in files.items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        result = import_files([folder / name for name in files], everything)
        return result, as_toml(result, everything)

    return give


@pytest.mark.parametrize(("trainer", "title"), TABLES)
@pytest.mark.parametrize("size", ["minimal", "full"])
def test_every_key_of_every_table_is_converted_or_listed(convert, trainer, title, size):
    make, argument, place = WAYS[trainer, title]
    around = {}
    if size == "full" and make not in (script, preset):
        around = {"process" if make is ai_toolkit else "options": FULL[trainer]}
    lost = []
    for rule in (rule for rule in PAGE[trainer][title] if rule.kind != "no effect"):
        key = rule.key.replace("*", "zwx")
        for value in ("zwx", 12345) if size == "minimal" else ("zwx",):
            _, text = convert(make(**{**around, argument: {**around.get(argument, {}), key: value}}))
            if not (asks_for_nothing(value, rule.off) or told(text, place + key) or (value == 12345 and key in SWITCHES)):
                lost.append((key, value))
    assert lost == []


@pytest.mark.parametrize(("trainer", "title"), TABLES)
def test_a_key_that_nobody_knows_is_listed_in_every_table(convert, trainer, title):
    make, argument, place = WAYS[trainer, title]
    result, text = convert(make(**{argument: {"zwx_unknown": 3}}))
    assert f"{place}zwx_unknown" in {left.place for left in result.left}
    assert told(text, f"{place}zwx_unknown")


json_values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["lora", "cosine", "AdamW8bit", "0.1", "STEP", "LOGIT_NORMAL", "512,768"]),
    st.lists(st.text(max_size=4), max_size=3),
)


@given(st.data())
def test_no_combination_of_keys_loses_one(convert, data):
    trainer, title = data.draw(st.sampled_from(TABLES))
    make, argument, place = WAYS[trainer, title]
    rules = {rule.key: rule for rule in PAGE[trainer][title] if "*" not in rule.key and rule.kind != "no effect"}
    found = data.draw(st.dictionaries(st.sampled_from(sorted(rules)), json_values, max_size=12))
    values = {key: value for key, value in found.items() if not any(other.startswith(f"{key}.") for other in found)}
    result, text = convert(make(**{argument: values}))
    said = "\n".join([text, *result.settled])
    left_out = tuple(result.left_out)
    asked = [place + key for key, value in values.items() if not asks_for_nothing(value, rules[key].off)]
    assert [key for key in asked if not (told(said, key) or key.startswith(left_out))] == []
