"""Options of nodes among those of the core, and nodes that are namespaces."""

import os
from pathlib import Path

import pytest

from smalti.config.config import Config
from smalti.config.options import Schema
from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import Plugins
from smalti.plugins.schema import schema_of
from support.nodes.fixtures import two_nodes as two_nodes, warm_nodes as warm_nodes


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in os.environ:
        if name.startswith(("SMALTI_", "ACCELERATE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(Selection(only=("toy", "cluster")))


@pytest.fixture(scope="session")
def schema() -> Schema:
    return schema_of(load_plugins(Selection(only=("toy", "cluster"))))


@pytest.fixture
def configure(schema):
    """configure("--flag=1", file=PATH, environment={...}) -> Config, as if nothing else were set."""

    def give(*flags: str, file: Path | None = None, environment: dict[str, str] | None = None) -> Config:
        return resolve(schema, flags, file=file, environment=environment or {})

    return give


@pytest.fixture
def write(tmp_path):
    """write("name.toml", text) -> the path of a file with this text."""

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return put


@pytest.fixture(scope="session")
def smalti() -> list[str]:
    import sys

    return [sys.executable, "-m", "smalti"]
