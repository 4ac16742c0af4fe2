"""`smalti config new` for every family: the file resolves, and what it plans is within the card. Without a network."""

import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from smalti.cli.arguments import CommandLine
from smalti.cli.entry import smalti
from smalti.data import check_sources
from smalti.errors import ExitCode, UserError
from smalti.launch import find_problems
from smalti.parallel import device_models
from smalti.plugins import choose_distributed
from smalti_diffusers.flavours import FLAVOURS, GATED
from smalti_plan import counted
from support.images import images_in
from support.whole import some

CARDS = ("24GB", "rtx5090", "h100-80g")


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory):
    """Caches of its own, no network, and models that are counted in this process, which has torch already."""
    folder = tmp_path_factory.mktemp("presets")
    images_in(folder / "photos", 3, caption="a photo of zwx cat")
    for caption in images_in(folder / "bare", 2).glob("*.txt"):
        caption.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(counted, "_in_process", lambda request, config: counted.count(request))
        patch.chdir(folder)
        yield folder


def new(*words):
    return CliRunner().invoke(smalti, ["config", "new", *words], standalone_mode=False)


def written(*words):
    """The answer, and the configuration of the file, whose only problem may be that torchao is not installed."""
    result = new(*words, "--to=config.toml", "--overwrite", "--json")
    assert result.exception is None, result.exception
    answer = json.loads(result.stdout)
    assert Path("config.toml").read_text() == answer["toml"]
    line = CommandLine.parse(["config.toml"])
    config = line.draft()
    problems = find_problems(config, line.plugins)
    assert [each for each in problems if each.package != "torchao"] == []
    check_sources(config, line.plugins)
    given = tomllib.loads(answer["toml"])
    assert given == {name: each["value"] for name, each in answer["values"].items()}
    assert {name: config.value(name) for name in ("num_processes", "train_batch_size")}.items() <= given.items()
    return answer, config, line.plugins


def within(answer):
    size = answer["plan"]["bytes"]
    return size["most"] <= size["device"] == answer["device"]["memory"]


@pytest.mark.parametrize("family", some(FLAVOURS, "sdxl"))
def test_a_lora_of_each_family_fits_cards_of_24_gb_and_more(family):
    for card in CARDS:
        for gpus in (1, 2):
            answer, config, plugins = written(f"--model={family}", f"--card={card}", f"--gpus={gpus}", "--data=photos")
            assert within(answer), (card, gpus)
            plan = choose_distributed(config, plugins)
            assert plan.origin.plugin == {"ddp": "ddp", "single": "ddp"}.get(answer["plan"]["strategy"], plan.origin.plugin)
            assert answer["plan"]["micro_batch"] * answer["plan"]["accumulation"] * gpus == gpus
    weights = FLAVOURS[family][next(iter(FLAVOURS[family]))]
    assert answer["values"]["pretrained_model_name_or_path"]["value"] == weights
    assert answer["model"]["gated"] == (weights in GATED) == ("hf auth login" in answer["toml"])
    assert answer["values"]["instance_data_dir"]["why"] == "3 images"
    sources = [answer["values"][name]["why"] for name in ("learning_rate", "lora_rank")]
    assert all("https://github.com/" in source for source in sources), sources
    assert answer["values"]["validation_prompt"]["value"] == ["a photo of zwx cat"]


@pytest.mark.parametrize("family", some(FLAVOURS, "pixart"))
def test_each_family_in_full_fits_eight_cards_of_24_gb(family):
    answer, _, _ = written(f"--model={family}", "--goal=full", "--card=24GB", "--gpus=8", "--data=photos")
    assert within(answer)
    assert answer["values"]["learning_rate"]["why"]


def test_small_cards_keep_the_frozen_weights_in_less_memory_or_train_smaller_images():
    small, _, _ = written("--model=sdxl", "--card=8GB", "--data=photos")
    large, _, _ = written("--model=sdxl", "--card=24GB", "--data=photos")
    assert within(small)
    assert small["plan"]["bytes"]["most"] < large["plan"]["bytes"]["most"]
    assert small["plan"]["recompute"] == "full" != large["plan"]["recompute"]
    why = small["values"]["gradient_checkpointing"]["why"]
    assert re.search(r"without [\d.]+ to [\d.]+ GiB: does not fit", why), why


def test_a_model_in_full_is_spread_over_the_gpus_and_one_that_cannot_fit_is_refused():
    answer, config, _ = written("--model=pixart", "--goal=full", "--card=24GB", "--gpus=4", "--images=900", "--data=photos")
    assert within(answer)
    assert answer["plan"]["effective_batch"] == 8
    assert answer["steps"] * 8 >= 900 * 10, "ten passes over the images"
    assert config.value("learning_rate") == 1e-5
    refused = new("--model=lumina2", "--goal=full", "--card=1GB", "--data=photos")
    assert isinstance(refused.exception, UserError)
    assert refused.exception.exit_code == ExitCode.PREFLIGHT
    assert "the least that a way to train needs is" in refused.exception.message


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ([], "no model given", "--model=NAME: "),
        (["--model=sdlx"], "the model 'sdlx' is unknown", "sdxl"),
        (["--model=sd3/3.5-lagre"], "has no flavour '3.5-lagre'", "sd3/3.5-large"),
        (["--model=sdxl", "--card=rtx4091"], "'rtx4091' is unknown", "rtx4090"),
        (["--model=sdxl", "--card=24GB", "--data=bare/empty"], "no images in bare/empty", "--data=FOLDER"),
        (["--model=toy", "--goal=lora", "--card=24GB"], "toy does not support LoRA", "--goal=full"),
        (["--model=sdxl", "--to=config.json"], "does not end in .toml", "--to=config.toml"),
        (["--model=sdxl", "--to=mine.toml"], "mine.toml already exists", "--overwrite replaces it"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(places, words, message, fix):
    (places / "bare" / "empty").mkdir(exist_ok=True)
    (places / "mine.toml").write_text("# mine\n")
    error = new(*words).exception
    assert isinstance(error, UserError)
    assert (message in error.message, fix in error.fix) == (True, True), error
    assert (places / "mine.toml").read_text() == "# mine\n"


def test_images_without_captions_get_a_prompt_and_the_command_is_in_the_file():
    answer, config, _ = written("--model=sdxl", "--card=RTX 4090", "--data=bare")
    assert config.value("instance_prompt") == "a photo of zwx"
    assert answer["device"]["title"] == device_models()["rtx4090"].title
    command = next(line for line in answer["toml"].splitlines() if line.startswith("#   smalti config new "))
    assert "'--card=RTX 4090' --gpus=1 --data=bare '--prompt=a photo of zwx'" in command


def test_on_a_terminal_it_asks_for_what_is_not_given(places):
    written("--model=pixart", "--card=24GB", "--data=photos")  # counts the model
    main, terminal = pty.openpty()
    try:
        words = [sys.executable, "-m", "smalti", "config", "new", "--card=24GB"]
        process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True)
        os.write(main, b"pixart\n2\n\nphotos\nasked.toml\n")
        _, questions = process.communicate(timeout=120)
    finally:
        os.close(main)
        os.close(terminal)
    assert process.returncode == 0, questions
    asked = [word for word in ("Model [", "Card, or", "GPUs [", "Goal (", "Folder of", "Write to") if word in questions]
    assert asked == ["Model [", "GPUs [", "Goal (", "Folder of", "Write to"]
    values = tomllib.loads((places / "asked.toml").read_text())
    assert (values["model_family"], values["num_processes"], values["model_type"]) == ("pixart", 2, "lora")
