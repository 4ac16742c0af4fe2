"""Fixtures for the tests of the core and for those of packages. Import them into a conftest."""

import os
import sys
from pathlib import Path

import pytest

from smalti.config import Config, resolve


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch, tmp_path_factory):
    """The environment of a fresh account: no SMALTI_ variables, no Accelerate configuration."""
    for name in os.environ:
        if name.startswith(("SMALTI_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "no-huggingface-home"))


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
    """The command line in a process of its own."""
    return [sys.executable, "-m", "smalti"]
