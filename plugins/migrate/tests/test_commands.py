"""`smalti config import`: what it refuses and writes, and that every file that it reads is recognized."""

import json

import pytest

from smalti import OptionGroup, Options, UserError
from smalti.config import Schema, recognize
from smalti_migrate.kohya import tables as kohya
from smalti_migrate.onetrainer import tables as onetrainer
from smalti_migrate.simpletuner.dialect import SimpleTuner, SimpleTunerOptions
from smalti_migrate.simpletuner.options import ENVIRONMENT
from smalti_testing.commands import check_commands
from support.commands import commands

KOHYA = "network_module = 'networks.lora'\nunet_lr = 1e-4"
AITOOLKIT = "job: extension\nconfig:\n  process:\n  - type: sd_trainer"


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(words...) -> the error; the exit code is that of a wrong configuration."""
    monkeypatch.setenv("SMALTI_PLUGINS", "toy,migrate,validation")

    def call(*words: object) -> str:
        code, _, errors = commands(capsys)(*words)
        assert code == 2
        return errors

    return call


def test_files_of_two_trainers_of_smalti_and_of_nobody_are_refused(refused, write):
    paths = [write("train.toml", KOHYA), write("aitk.yaml", AITOOLKIT)]
    assert "these files are of different trainers" in refused("config", "import", *paths)
    ours, theirs = write("ours.toml", "model_family = 'toy'\nnetwork_dim = 4"), write("train.toml", KOHYA)
    assert f"{ours} is a configuration of smalti" in refused("config", "import", theirs, ours)
    assert "is not a configuration of a known trainer" in refused(
        "config", "import", write("few.toml", "seed = 1\nnetwork_dim = 4")
    )


def test_an_import_goes_to_a_new_file_only(refused, write, tmp_path, capsys):
    path = write("train.toml", KOHYA)
    (tmp_path / "mine.toml").write_text("mine = 1")
    assert "already exists" in refused("config", "import", path, f"--to={tmp_path / 'mine.toml'}")
    assert (tmp_path / "mine.toml").read_text() == "mine = 1"
    words = ("import", path, "--model_family=sdxl", f"--to={tmp_path / 'new.toml'}")
    code, _, told = commands(capsys, "config")(*words)
    assert code == 0
    assert "not converted; the reasons are at the end of" in told
    assert "\n  datasets: these files name no images\n" in told
    code, output, _ = commands(capsys, "config")("import", path, "--json", "--model_family=sdxl")
    found = json.loads(output)
    assert (code, found["values"]["learning_rate"]["value"]) == (0, 1e-4)
    assert {each["where"] for each in found["left"]} == {"datasets"}


def test_all_scripts_models_and_variables_of_the_tables_are_recognized():
    scripts = (*kohya.SCRIPTS, *kohya.OTHER_SCRIPTS)
    lines = [f"accelerate launch {folder}{script} --x" for script in scripts for folder in ("", "sd-scripts/", "'C:\\sd\\")]
    assert [line for line in lines if str(recognize(line, None)) != "a configuration of kohya's sd-scripts"] == []
    models = (*onetrainer.FAMILIES, *onetrainer.OTHER_MODELS)
    found = {model: str(recognize("", {"model_type": model})) for model in models}
    assert {model: each for model, each in found.items() if each != "a configuration of OneTrainer"} == {}
    texts = [f"{name}=1\nexport MODEL_FAMILY=x" for name in ENVIRONMENT]
    assert [text for text in texts if str(recognize(text, None)) != "a configuration of SimpleTuner"] == []


def test_the_command_keeps_the_contract():
    check_commands("migrate")


def test_there_is_one_spelling_beside_the_own(capsys):
    other = OptionGroup(name="other", title="Other", options=SimpleTunerOptions, dialect=SimpleTuner())
    with pytest.raises(UserError, match="in the spelling of SimpleTuner and SimpleTuner"):
        Schema((OptionGroup(name="none", title="None", options=Nothing, dialect=SimpleTuner()), other))


class Nothing(Options):
    """No option."""
