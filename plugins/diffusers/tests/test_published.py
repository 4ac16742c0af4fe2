"""Models by their names on the hub: planned and checked without a network, by the configurations that are shipped."""

import json
import socket

import huggingface_hub.constants
import pytest
import torch
from PIL import Image

from smalti import UserError
from smalti.cli.arguments import CommandLine
from smalti.cli.entry import main
from smalti.plugins.lookup import find_family
from smalti_diffusers.flavours import FLAVOURS, shipped_folder
from smalti_diffusers.sources import location
from smalti_diffusers.sources.components import Components
from smalti_fsdp2.detection import detect
from smalti_plan.counted import count, request_of
from support.whole import some

EVERY = [(family, flavour) for family, flavours in FLAVOURS.items() for flavour in flavours]
FIRST = [(family, next(iter(FLAVOURS[family]))) for family in ("flux", "lumina2", "sana", "sdxl")]


@pytest.fixture(autouse=True)
def asked(tmp_path, monkeypatch):
    """No network, and nothing of the hub on this machine. The list of hosts that were to be connected to all the same."""
    hosts = []

    def refused(*arguments, **_):
        hosts.append(arguments)
        raise ConnectionError("no network here")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # of other processes
    monkeypatch.chdir(tmp_path)
    location._small.cache_clear()
    return hosts


def command_line(family, *flags):
    return CommandLine.parse([f"--model_family={family}", "--output_dir=run", "--max_train_steps=1", *flags])


def exit_code(*words):
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


@pytest.mark.parametrize("family", some(FLAVOURS, "flux", "sdxl"))
def test_each_family_is_counted(family, asked):
    config = command_line(family, "--resolution=512", "--resolution_type=pixel").config()
    facts = count(request_of(config, "cuda"))
    assert facts.parameters > 5e8
    assert facts.sample.flops > 1e11
    assert asked == []


def test_a_plan_by_the_name_on_the_hub(capsys):
    flags = ["--model_type=lora", "--resolution=64", "--resolution_type=pixel", "--max_train_steps=1", "--output_dir=run"]
    name = "--pretrained_model_name_or_path=PixArt-alpha/PixArt-XL-2-512x512"
    assert exit_code("plan", "--model_family=pixart", name, "--gpu=rtx4090", "--quick", "--json", *flags) == 0
    assert json.loads(capsys.readouterr().out)["schema"]


@pytest.mark.parametrize(
    ("family", "flavour"), some(EVERY, *(each for each in FIRST if each[0] in ("flux", "lumina2", "sana", "sdxl")))
)
def test_blocks_of_each_model_are_detected_and_its_other_parts_are_described(family, flavour, asked):
    given = command_line(family, f"--pretrained_model_name_or_path={FLAVOURS[family][flavour]}")
    found = detect(given.config(), given.plugins, refresh=True)
    assert found.structure.blocks > 10
    assert found.structure.largest_block < found.structure.parameters / 8
    components = Components(shipped_folder(FLAVOURS[family][flavour]))
    with torch.device("meta"):
        assert sum(each.numel() for each in components.build("vae").parameters()) > 5e7
    components.load("scheduler")
    assert asked == []


@pytest.mark.parametrize("family", some(FLAVOURS, "sdxl"))
def test_a_dry_run_of_each_family_says_that_weights_will_be_downloaded(family, tmp_path, capsys, asked):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save("images/one.png")
    flags = ["--instance_data_dir=images", "--instance_prompt=a dot", "--caption_strategy=instanceprompt", "--resolution=64"]
    given = [
        f"--model_family={family}",
        "--output_dir=run",
        "--max_train_steps=1",
        "--resolution_type=pixel",
        "--use_cpu",
        *flags,
    ]
    assert exit_code("train", *given, "--dry-run") == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    name = next(iter(FLAVOURS[family].values()))
    assert f"the weights of {name} are not on this machine" in shown.out + shown.err
    assert asked == []


def test_a_run_needs_the_weights(asked):
    given = command_line("flux")
    with pytest.raises(UserError, match=r"FLUX\.1-dev is not a local file.* the download .* failed") as caught:
        find_family(given.config(), given.plugins)
    assert "hf auth login" in caught.value.fix
    assert asked
