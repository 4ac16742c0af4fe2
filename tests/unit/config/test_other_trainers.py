"""Whose file it is; and that `train` says so."""

import json

import pytest

from smalti.config import TABLES, known_packages, parse_value
from smalti.config.other_trainers import KOHYA_KEYS, recognize
from smalti.errors import ConfigError
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from support.commands import commands

KOHYA_DATA = '[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "x"'
FILES = {
    "train.toml": ("network_module = 'networks.lora'\nunet_lr = 1e-4", "a configuration of kohya's sd-scripts"),
    "sections.toml": ("[net]\nnetwork_dim = 4\n[save]\nsave_every_n_epochs = 1", "a configuration of kohya's sd-scripts"),
    "dataset.toml": (KOHYA_DATA, "a dataset file of kohya's sd-scripts"),
    "dataset.json": ('{"datasets": [{"subsets": [{"image_dir": "x"}]}]}', "a dataset file of kohya's sd-scripts"),
    "run.sh": ("accelerate launch sdxl_train_network.py --network_dim=4", "a configuration of kohya's sd-scripts"),
    "aitk.yaml": ("job: extension\nconfig:\n  process:\n  - type: sd_trainer", "a configuration of ai-toolkit"),
    "onetrainer.json": ('{"model_type": "FLUX_DEV_1", "training_method": "LORA"}', "a configuration of OneTrainer"),
    "concepts.json": ('[{"name": "", "path": "x", "text": {"prompt_source": "sample"}}]', "a dataset file of OneTrainer"),
    "samples.json": ('[{"prompt": "x", "cfg_scale": 7.0}]', "a file of prompts of OneTrainer"),
    "gui.json": ('{"LoRA_type": "Standard", "network_dim": 8, "epoch": 1}', "a configuration of kohya's sd-scripts"),
    "ours.toml": ("model_family = 'toy'\nnetwork_dim = 4\nunet_lr = 1", "a configuration of smalti"),
    "data.json": ('[{"id": "a", "type": "local", "instance_data_dir": "x"}]', "a dataset file of SimpleTuner"),
    "config.env": ("export MODEL_FAMILY=flux\nMAX_NUM_STEPS=3", "a configuration of SimpleTuner"),
    "few.toml": ("seed = 1\nlearning_rate = 1e-4\nnetwork_dim = 4", "None"),
    "empty.json": ("{}", "None"),
    "other.sh": ("python prepare.py --network_dim=4", "None"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognized_by_what_it_says(write, name):
    text, expected = FILES[name]
    path = write(name, text)
    assert str(recognize(text, parse_value(path, text) if path.suffix in TABLES else None)) == expected


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(words...) -> the error; the exit code is that of a wrong configuration."""
    monkeypatch.setenv("SMALTI_PLUGINS", "toy")

    def call(*words: object, code: int = 2) -> str:
        found, _, errors = commands(capsys)(*words)
        assert found == code
        return errors

    return call


TOY = ("--model_family=toy", "--max_train_steps=1", "--output_dir=run")


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["config", "show"]])
def test_a_configuration_of_another_trainer_is_named_with_the_command_that_imports_it(refused, write, command):
    path = write("my train.toml", FILES["train.toml"][0])
    errors = refused(*command[:1], *command[1:], f"--config={path}") if "--dry-run" in command else refused(*command, path)
    assert f"{path} is a configuration of kohya's sd-scripts" in errors
    assert f"fix: smalti config import '{path}' --to='my train-smalti.toml'" in errors


def test_so_is_a_dataset_file(refused, write):
    errors = refused("train", *TOY, f"--data_backend_config={write('d.toml', KOHYA_DATA)}")
    assert "a dataset file of kohya's sd-scripts" in errors
    assert "--to=d-smalti.toml" in errors


def test_the_wrong_one_of_two_files_is_named(refused, write):
    data, config = write("data.json", FILES["data.json"][0]), write("config.json", json.dumps({"--model_family": "toy"}))
    assert f"fix: smalti train CONFIG --data_backend_config={data}" in refused("train", data)
    assert f"fix: smalti train {config};" in refused("train", *TOY, f"--data_backend_config={config}")


def test_where_the_package_that_converts_them_is_missing_it_is_named(refused, write, monkeypatch):
    monkeypatch.setattr(known_packages, "installed", lambda name: name != "smalti-migrate")
    path = write("train.toml", FILES["train.toml"][0])
    errors = refused("train", path, code=4)
    assert f"{path} is a configuration of kohya's sd-scripts, which smalti-migrate converts" in errors
    assert "fix: pip install " in errors


def test_no_option_of_smalti_makes_a_file_one_of_another_trainer():
    everything = schema_of(load_plugins())
    assert KOHYA_KEYS & {*everything.options, *everything.aliases} == set()


def test_unknown_keys_of_a_json_file_say_what_reads_those_of_simpletuner(configure, write, monkeypatch):
    monkeypatch.setattr(known_packages, "installed", lambda name: False)
    with pytest.raises(ConfigError) as caught:
        configure(file=write("config.json", json.dumps({"model_family": "toy", "lora_type": "standard", "vae_batch_size": 1})))
    assert [problem.message for problem in caught.value.problems][:2] == [
        "unknown option lora_type",
        "unknown option vae_batch_size",
    ]
    assert "if this is a configuration of SimpleTuner, smalti-migrate reads it" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        configure(file=write("own.json", json.dumps({"model_family": "toy", "learning_rat": 1})))
    assert len(caught.value.problems) == 1


def test_a_run_that_was_started_with_the_defaults_of_simpletuner_names_the_package(configure, write, monkeypatch):
    monkeypatch.setattr(known_packages, "installed", lambda name: False)
    with pytest.raises(ConfigError, match="defaults_from belongs to smalti-migrate") as caught:
        configure(file=write("config.toml", 'model_family = "toy"\ndefaults_from = "smalti"\n'))
    assert caught.value.exit_code == 4


def test_the_page_of_simpletuners_options_needs_the_package(refused, monkeypatch):
    monkeypatch.setenv("SMALTI_PLUGINS", "toy,testing")
    assert "smalti-migrate has the options of other trainers" in refused("config", "reference", "--simpletuner", code=4)
