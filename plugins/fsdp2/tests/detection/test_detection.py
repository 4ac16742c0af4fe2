"""What a model is made of, found without weights; answers that are kept, and given only while they hold."""

import json
import os
import subprocess
import sys

import pytest

from smalti import UserError
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import check
from smalti.training.build_run import build_model
from smalti_fsdp2.checks import problems
from smalti_fsdp2.detection import Detection, block_cache, detect, detected

SMALL = {"num_layers": 2, "num_single_layers": 3, "width": 64}


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def look(plugins, configure, notes):
    """look("--model_family=toy", refresh=True) -> Detection; what it says goes to `notes`."""

    def give(*flags: str, refresh: bool = False) -> Detection:
        return detect(configure(*flags), plugins, refresh=refresh, report=notes.append)

    return give


def test_a_model_of_the_size_of_flux_is_counted_block_by_block(look):
    structure = look("--model_family=fluxsized").structure
    assert (structure.parameters, structure.buffers) == (11_901_408_320, 64)
    assert structure.suggested == ("DoubleBlock", "SingleBlock")
    assert {each.class_name: (each.occurrences, each.largest, each.nested) for each in structure.classes} == {
        "DoubleBlock": (19, 339_831_296, False),
        "Stream": (38, 169_915_648, True),
        "SingleBlock": (38, 141_591_808, False),
    }
    assert (structure.blocks, structure.largest_block, structure.outside) == (57, 339_831_296, 64_124_992)
    assert structure.no_split_modules == ("DoubleBlock", "SingleBlock")
    double = structure.classes[0]
    assert (double.class_name, double.first, double.last) == ("DoubleBlock", "double_blocks.0", "double_blocks.18")


def test_twelve_billion_parameters_take_less_than_fifty_megabytes(site):
    code = """
import resource
import smalti.training.build_run, smalti_fluxsized
from smalti.cli.arguments import CommandLine
from smalti_fsdp2.detection import detect
command_line = CommandLine.parse(["--model_family=fluxsized"])
config = command_line.config()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
detect(config, command_line.plugins, refresh=True)
print((peak() - before) / 1024)
"""
    assert float(python(code, site)) < 50


def test_a_known_answer_is_the_same_and_needs_no_torch(look, site):
    fresh = look("--model_family=toy")
    code = """
import json, sys
from smalti.cli.arguments import CommandLine
from smalti_fsdp2.detection import detect
command_line = CommandLine.parse(["--model_family=toy"])
print(json.dumps(detect(command_line.config(), command_line.plugins).as_json()))
assert not {"torch", "numpy", "accelerate"} & sys.modules.keys()
"""
    assert json.loads(python(code, site)) == {**fresh.as_json(), "cached": True}


def python(code: str, site) -> str:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_question_in_other_words_finds_the_answer(look, checkpoint, monkeypatch):
    folder = checkpoint(**SMALL)
    look("--model_family=fluxsized", f"--pretrained_model_name_or_path={folder}")
    monkeypatch.chdir(folder.parent)
    assert look("--model-family=Fluxsized", "--pretrained_model=checkpoint", "--seed=7", "--instance_data_dir=x").cached


@pytest.mark.parametrize(
    "flags",
    [
        ["--model_family=toy", "--toy_depth=7"],
        ["--model_family=toy", "--resolution=64"],
        ["--model_family=toy", "--model_flavour=other"],
        ["--model_family=fluxsized", "--model_flavour=small"],
    ],
    ids=" ".join,
)
def test_what_may_shape_the_model_makes_another_question(look, flags):
    look("--model_family=toy")
    assert not look(*flags).cached


def test_a_checkpoint_whose_configuration_changed_is_looked_at_anew(look, checkpoint):
    flags = ["--model_family=fluxsized", f"--pretrained_model_name_or_path={checkpoint(**SMALL)}"]
    assert [look(*flags).cached, look(*flags).cached] == [False, True]
    checkpoint(**{**SMALL, "num_layers": 5})
    anew = look(*flags)
    assert (anew.cached, anew.structure.classes[0].occurrences) == (False, 5)


def test_a_changed_folder_that_another_option_names_is_looked_at_anew(look, checkpoint, tmp_path):
    file = tmp_path / "model.safetensors"
    file.mkdir()
    (file / "transformer").mkdir()
    (file / "transformer" / "config.json").write_text("{}")
    base = checkpoint(**SMALL)
    flags = ["--model_family=fluxsized", f"--pretrained_model_name_or_path={file}", f"--fluxsized_base={base}"]
    assert [look(*flags).cached, look(*flags).cached] == [False, True]
    checkpoint(**{**SMALL, "num_layers": 5})
    assert (look(*flags).cached, look(*flags).structure.classes[0].occurrences) == (False, 5)


def test_a_checkpoint_that_comes_back_to_what_it_was_is_looked_at_anew(look, checkpoint):
    flags = ["--model_family=fluxsized", f"--pretrained_model_name_or_path={checkpoint(**SMALL)}"]
    for layers in (2, 4, 2):
        checkpoint(**{**SMALL, "num_layers": layers})
        assert look(*flags).structure.blocks == layers + 3


def test_a_newer_package_of_a_family_is_asked_again(look, site):
    look("--model_family=fluxsized")
    metadata = site / "smalti_fluxsized-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert not look("--model_family=fluxsized").cached


@pytest.mark.parametrize("flags", [["--model_flavour=small"], []], ids=["a flavour", "the family chooses"])
def test_a_newer_commit_in_the_hubs_cache_is_looked_at(look, tmp_path, flags):
    refs = tmp_path / "huggingface" / "hub" / "models--somebody--fluxsized-small" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("one")
    look("--model_family=fluxsized", *flags)
    assert look("--model_family=fluxsized", *flags).cached
    (refs / "main").write_text("two")
    assert not look("--model_family=fluxsized", *flags).cached


def test_refreshing_looks_anew_and_keeps_that(look, notes):
    look("--model_family=toy")
    assert not look("--model_family=toy", refresh=True).cached
    assert (look("--model_family=toy").cached, block_cache().entries(), notes) == (True, 1, [])


def test_an_answer_says_which_checkpoint_it_is_about(look, checkpoint):
    folder = checkpoint(**SMALL)
    paths = [
        look("--model_family=fluxsized", f"--pretrained_model_name_or_path={folder}").pretrained_model,
        look("--model_family=fluxsized", "--model_flavour=small").pretrained_model,
        look("--model_family=toy").pretrained_model,
    ]
    assert paths == [str(folder), "somebody/fluxsized-small", None]


@pytest.mark.parametrize("spoilt", [{"structure": {}}, {"detected_at": 3, "structure": None}, {}])
def test_a_kept_answer_that_makes_no_sense_is_told_and_looked_at_anew(look, notes, spoilt):
    look("--model_family=toy")
    place = block_cache().path
    content = json.loads(place.read_text())
    [entry] = content["entries"].values()
    entry["detection"] = spoilt
    place.write_text(json.dumps(content))
    assert not look("--model_family=toy").cached
    assert "detecting again" in notes[0]


def test_an_answer_survives_json(look):
    detection = look("--model_family=toy")
    assert Detection.from_json(json.loads(json.dumps(detection.as_json()))) == detection


def test_an_unknown_family_is_told_with_the_known_ones(look):
    with pytest.raises(UserError) as raised:
        look("--model_family=fluxsize")
    assert str(raised.value) == "Unknown model_family 'fluxsize'.\n  fix: did you mean fluxsized? known: fluxsized, toy"


# --- classes that the user names ------------------------------------------------------------------------------------

TYPO = "--fsdp_transformer_layer_cls_to_wrap=ToyBlok"


def blocks(configure, plugins, *flags):
    config = configure("--model_family=toy", *flags)
    return build_model(config, plugins, find_family(config, plugins))[1]


def test_hook_detect_blocks_takes_the_classes_that_are_named_for_a_sharded_run(configure, plugins):
    found = blocks(configure, plugins, "--fsdp_enable", "--fsdp_transformer_layer_cls_to_wrap=ToyBlock, Embedding")
    assert [block.class_name for block in found] == ["Embedding", *["ToyBlock"] * 6]


@pytest.mark.parametrize("flags", [[], ["--fsdp_enable", "--fsdp_auto_wrap_policy=NO_WRAP"]], ids=["not sharded", "no wrap"])
def test_named_classes_do_not_matter_where_they_have_no_effect(configure, plugins, flags):
    assert {block.class_name for block in blocks(configure, plugins, TYPO, *flags)} == {"ToyBlock"}


def test_a_class_that_the_model_does_not_have_is_told_on_the_ranks_with_the_nearest(configure, plugins):
    with pytest.raises(UserError) as raised:
        blocks(configure, plugins, "--fsdp_enable", TYPO)
    assert raised.value.message == "the model has no part of a class 'ToyBlok'"
    assert raised.value.fix == "did you mean ToyBlock? the model is made of Embedding, Linear, ToyBlock"


def test_it_is_told_before_launch_once_the_model_was_looked_at(configure, plugins, look):
    config = configure("--model_family=toy", "--fsdp_enable", TYPO)
    assert problems(config) == []
    look("--model_family=toy")
    [problem] = problems(config)
    assert (problem.message, problem.where) == (
        "the model has no part of a class 'ToyBlok'",
        "flag (--fsdp_transformer_layer_cls_to_wrap)",
    )
    with pytest.raises(UserError, match="did you mean ToyBlock"):
        check(config, plugins)


def test_asking_for_what_is_known_writes_nothing(configure, cache_home):
    assert detected(configure("--model_family=toy")) is None
    assert not cache_home.exists()
