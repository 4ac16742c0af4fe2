"""Advice about packages: only what works."""

from pathlib import Path
from shlex import split

import pytest

from smalti.config import known_packages
from smalti.config.known_packages import PLUGINS
from smalti.errors import ConfigError


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(known_packages, "installed", lambda name: False)


def test_a_package_is_installed_from_the_clone_that_smalti_came_from(nothing_installed):
    assert split(PLUGINS["optimizers"].fix) == ["pip", "install", str(Path(__file__).parents[3] / "plugins" / "optimizers")]


def test_without_a_clone_it_is_installed_by_name(nothing_installed, monkeypatch):
    monkeypatch.setattr(known_packages, "_installed_from", dict)
    assert PLUGINS["optimizers"].fix == "pip install smalti-optimizers"


def test_from_a_repository_it_is_installed_from_the_same_commit(nothing_installed, monkeypatch):
    source = {"url": "https://example.org/smalti.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "core"}
    monkeypatch.setattr(known_packages, "_installed_from", lambda: source)
    place = "git+https://example.org/smalti.git@abc#subdirectory=plugins/optimizers"
    assert PLUGINS["optimizers"].fix == f"pip install 'smalti-optimizers @ {place}'"


def test_a_clone_in_a_path_with_spaces_is_one_word(nothing_installed, monkeypatch):
    monkeypatch.setattr(known_packages, "_clone", lambda: Path("/home/a user/smalti"))
    assert split(PLUGINS["optimizers"].fix) == ["pip", "install", "/home/a user/smalti/plugins/optimizers"]


def test_a_package_brings_those_that_it_depends_on(nothing_installed):
    assert PLUGINS["storage_s3"].fix == f"pip install {PLUGINS['storage_s3'].target}"
    assert [Path(each).name for each in split(PLUGINS["storage_s3"].target)] == ["storage_s3", "data"]


def test_several_missing_packages_are_named_in_one_command(nothing_installed, configure):
    with pytest.raises(ConfigError) as caught:
        configure("--fsdp_enable", "--lora_rank=4")
    targets = [PLUGINS[name].target for name in ("diffusers", "fsdp2")]
    assert (caught.value.exit_code, f"pip install {' '.join(targets)}" in str(caught.value)) == (4, True)


def test_all_that_a_missing_package_has_is_one_problem_with_one_fix(nothing_installed, configure):
    with pytest.raises(ConfigError) as caught:
        configure("--fsdp_enable", "--learning_rate=x", "--fsdp_activation_checkpointing")
    told = str(caught.value).splitlines()
    assert told[:4] == [
        "the configuration has 2 problems:",
        "  - command line: --fsdp_enable belongs to smalti-fsdp2",
        "    command line: --fsdp_activation_checkpointing belongs to smalti-fsdp2",
        f"    fix: {PLUGINS['fsdp2'].fix}",
    ]
    assert len(caught.value.problems) == 3


def test_an_option_of_no_package_is_unknown_and_not_a_matter_of_installing(configure):
    with pytest.raises(ConfigError, match="unknown option --aws_compress") as caught:
        configure("--aws_compress")
    assert (caught.value.exit_code, "pip install" in str(caught.value)) == (2, False)
