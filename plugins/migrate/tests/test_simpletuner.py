"""Files of SimpleTuner as one file that says everything."""

import json

import pytest

from smalti.cli.entry import main
from smalti.config.resolution import resolve
from smalti_migrate.commented_toml import as_toml
from smalti_migrate.importing import import_files
from support.commands import commands

CONFIG = {
    "--model_family": "flux",
    "--model_type": "lora",
    "--lora_type": "standard",
    "--optimizer": "adamw_bf16",
    "--learning_rate": "1e-4",
    "--max_train_steps": 300,
    "--num_train_epochs": 0,
    "--data_backend_config": "data.json",
    "--output_dir": "out",
    "--vae_batch_size": 4,
    "--controlnet": True,
}
DATA = [
    {
        "id": "my cats",
        "instance_data_dir": "cats",
        "caption_strategy": "filename",
        "crop": True,
        "_comment": "x",
        "json": {"path": "t"},
    },
    {"id": "hub", "type": "huggingface", "dataset_name": "a/b"},
    {"id": "list", "type": "webshart", "source": "shards"},
    {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
]
ENVIRONMENT = """
# a comment
export MODEL_FAMILY='flux'
export MODEL_TYPE=lora
DATALOADER_CONFIG="data.json"
MAX_NUM_STEPS=300
TRAINER_EXTRA_ARGS="--lora_rank=4 --use_ema"
TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --seed=7"
"""


@pytest.fixture
def converted(imported, write):
    """The configuration and the data file together."""
    write("data.json", json.dumps(DATA))
    return imported({"config.json": json.dumps(CONFIG)})


def test_options_have_our_names_and_simpletuners_defaults_stand_in_the_file(converted):
    values, left, text = converted
    assert {
        key: values[key] for key in ("optimizer", "adam_epsilon", "grad_clip_method", "max_grad_norm", "train_batch_size")
    } == {
        "optimizer": "adamw",
        "adam_epsilon": 1e-6,
        "grad_clip_method": "value",
        "max_grad_norm": 2.0,
        "train_batch_size": 4,
    }
    assert "max_grad_norm = 2 # SimpleTuner's default\n" in text
    assert "learning_rate = 0.0001 # config.json: learning_rate\n" in text
    assert values.keys().isdisjoint(
        {"num_train_epochs", "data_backend_config", "defaults_from", "accelerate_config", "vae_batch_size"}
    )
    assert "# - --vae_batch_size in " in text
    assert any("controlnet" in each.why for each in left.values())


def test_datasets_stand_in_the_file_with_the_keys_that_they_have(converted):
    values, left, _ = converted
    assert values["datasets"] == [
        {"id": "my cats", "instance_data_dir": "cats", "caption_strategy": "filename", "crop": True, "json": {"path": "t"}},
        {"id": "hub", "type": "huggingface", "dataset_name": "a/b"},
        {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
    ]
    assert "download the tar shards" in next(each.fix for place, each in left.items() if "list" in place)


def test_datasets_of_packages_that_are_absent_are_left_with_the_package(monkeypatch, write, capsys):
    monkeypatch.setenv("SMALTI_WITHOUT", "data")
    with pytest.raises(SystemExit):
        main(["config", "import", str(write("data.json", json.dumps(DATA))), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["id"]["value"] for each in found["datasets"]] == ["my cats", "texts"]
    assert any("'huggingface' belongs to smalti-data" in each["message"] for each in found["left"])


def test_a_dataset_on_s3_is_kept(imported):
    bucket = {"id": "bucket", "type": "aws", "aws_bucket_name": "b"}
    values, left, _ = imported({"data.json": json.dumps([*DATA[::3], bucket])})
    assert (values["datasets"][-1], left) == (bucket, {})


def test_what_was_imported_means_the_same_as_the_file_itself(everything, write):
    """Read as it is, with SimpleTuner's defaults, or imported: every option has the same value."""
    source = write("config.json", json.dumps({key: value for key, value in CONFIG.items() if "controlnet" not in key}))
    write("data.json", json.dumps(DATA))
    imported = write("config.toml", as_toml(import_files([source], everything), everything))
    flags = ["--accelerate_config=none"]
    before = resolve(everything, flags, file=source, environment={}).values()
    after = resolve(everything, flags, file=imported, environment={}).values()
    apart = {"datasets", "data_backend_config", "defaults_from"}
    assert {name for name in before if before[name] != after[name]} <= apart


def test_variables_of_config_env_are_options(imported, write):
    write("data.json", json.dumps(DATA))
    values = imported({"config.env": ENVIRONMENT})[0]
    found = [values.get(key) for key in ("model_family", "max_train_steps", "lora_rank", "use_ema", "seed")]
    assert found == ["flux", 300, 4, True, 7]


def test_a_data_file_alone_becomes_datasets(imported):
    values = imported({"data.json": json.dumps(DATA)})[0]
    assert (values.keys(), len(values["datasets"])) == ({"datasets"}, 3)


def test_a_secret_is_not_copied_and_the_list_of_what_is_left_says_so(imported):
    webhook = {"webhook_type": "raw", "callback_url": "https://hooks.example.com/", "auth_token": "hunter2"}
    values, left, text = imported({"config.json": json.dumps({**CONFIG, "webhook_config": webhook})})
    assert "webhook_config" not in values
    assert "hunter2" not in f"{text}{left}"
    [line] = [each for each in left.values() if each.why == "secrets are not copied"]
    assert "SMALTI_WEBHOOK_CONFIG" in line.fix
    values, left, text = imported({"config.json": json.dumps({**CONFIG, "webhook_config": "config/webhooks.json"})})
    assert values["webhook_config"] == "config/webhooks.json"


def test_datasets_of_storages_and_tables_that_plugins_have_are_kept(monkeypatch, write, capsys):
    rows = [
        {"id": "far", "type": "aws", "aws_bucket_name": "cats", "aws_data_prefix": "x"},
        {"id": "near", "instance_data_dir": "cats", "metadata_backend": "parquet", "parquet": {"path": "t.parquet"}},
    ]
    monkeypatch.setenv("SMALTI_PLUGINS", "migrate,storage_s3,data,validation")
    code, output, _ = commands(capsys, "config")("import", write("data.json", json.dumps(rows)), "--json")
    found = json.loads(output)
    assert (code, [each["id"]["value"] for each in found["datasets"]], found["left"]) == (0, ["far", "near"], [])


def test_extra_arguments_of_config_env_are_read_as_a_command_line(imported):
    text = ENVIRONMENT + "TRAINER_EXTRA_ARGS+='--lora_alpha 8 --report_to=none'\n"
    assert imported({"config.env": text})[0]["lora_alpha"] == 8
