"""A place of its own for what is kept, a family with the size of Flux, and the command line in this process."""

import os
import shutil
from pathlib import Path

import pytest

from smalti.config.config import Config
from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import Plugins
from smalti.plugins.schema import schema_of
from support.commands import commands

SITE = Path(__file__).parent / "site"


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path) -> Path:
    """An account without settings, whose caches are in an empty folder."""
    for name in os.environ:
        if name.startswith(("SMALTI_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "caches"


@pytest.fixture
def site(monkeypatch, tmp_path) -> Path:
    """A folder with the installed package of the family, which a test may change."""
    place = tmp_path / "site"
    shutil.copytree(SITE, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.fixture
def plugins(site) -> Plugins:
    return load_plugins(Selection(only=("fsdp2", "fluxsized", "toy")))


@pytest.fixture
def configure(plugins):
    """configure("--model_family=toy", ...) -> Config."""

    def give(*flags: str) -> Config:
        return resolve(schema_of(plugins), flags, environment={"HF_HOME": os.devnull})

    return give


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(num_layers=2, ...) -> a folder in the diffusers layout, with these words in the transformer's config.json."""

    def make(**values: int) -> Path:
        folder = tmp_path / "checkpoint" / "transformer"
        folder.mkdir(parents=True, exist_ok=True)
        numbers = ", ".join(f'"{name}": {value}' for name, value in values.items())
        (folder / "config.json").write_text(f"{{{numbers}}}")
        return folder.parent

    return make


@pytest.fixture
def run(capsys, site):
    """run("detect-blocks", ...) -> (exit code, output, errors), in this process."""
    return commands(capsys)
