"""What several of these tests read."""

import tomllib
from pathlib import Path

import pytest

from smalti.plugins.discovery import BUILT_IN, Selection, load_plugins
from smalti.plugins.registry import Plugins


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def shipped(root) -> Plugins:
    """The built-in plugins and those of the packages in this repository."""
    projects = [tomllib.loads(path.read_text())["project"] for path in root.glob("plugins/*/pyproject.toml")]
    own = tuple(name for project in projects for name in project.get("entry-points", {}).get("smalti.plugins", ()))
    plugins = load_plugins(Selection(only=own))
    assert {name for name, info in plugins.infos.items() if info.state == "active"} == {*BUILT_IN, *own}
    return plugins
