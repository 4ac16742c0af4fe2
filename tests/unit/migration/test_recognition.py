"""Whose file it is; and that `train` says so."""

import json

import pytest

from smalti.cli.entry import main
from smalti.migration.files import open_file
from smalti.migration.recognition import SIGNS, recognize

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
    assert str(recognize(open_file(write(name, text)))) == expected


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(words...) -> the error; the exit code is that of a wrong configuration."""
    monkeypatch.setenv("SMALTI_PLUGINS", "toy")

    def call(*words: object) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(map(str, words)))
        assert left.value.code == 2
        return capsys.readouterr().err

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


def test_files_of_two_trainers_of_smalti_and_of_nobody_are_refused(refused, write):
    paths = [write(name, FILES[name][0]) for name in ("train.toml", "aitk.yaml")]
    assert "these files are of different trainers" in refused("config", "import", *paths)
    ours, theirs = write("ours.toml", FILES["ours.toml"][0]), write("train.toml", FILES["train.toml"][0])
    assert f"{ours} is a configuration of smalti" in refused("config", "import", theirs, ours)
    assert "is not a configuration of a known trainer" in refused("config", "import", write("few.toml", FILES["few.toml"][0]))


def test_an_import_goes_to_a_new_file_only(refused, write, tmp_path, capsys):
    path = write("train.toml", FILES["train.toml"][0])
    (tmp_path / "mine.toml").write_text("mine = 1")
    assert "already exists" in refused("config", "import", path, f"--to={tmp_path / 'mine.toml'}")
    assert (tmp_path / "mine.toml").read_text() == "mine = 1"
    with pytest.raises(SystemExit) as left:
        main(["config", "import", str(path), "--json", "--model_family=sdxl"])
    found = json.loads(capsys.readouterr().out)
    assert (left.value.code, found["values"]["learning_rate"]["value"]) == (0, 1e-4)
    assert {each["where"] for each in found["left"]} == {"datasets", "default of kohya's sd-scripts: network_train_unet_only"}


def test_no_option_of_smalti_makes_a_file_one_of_another_trainer(everything):
    assert SIGNS & {*everything.options, *everything.aliases} == set()
