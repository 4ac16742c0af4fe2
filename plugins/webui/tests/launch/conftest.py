"""Drafts of a tiny model, and images to train it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from smalti_webui.configs.drafts import Draft, drafts_of
from smalti_webui.server.settings import Settings

TINY = """# kept
model_family = "toy"
toy_depth = 2
instance_data_dir = "photos"
output_dir = "runs/tiny"
resolution = 32
max_train_steps = 3
train_batch_size = 2
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and templates of the user who runs the tests are neither read nor changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def photos(root: Path) -> Path:
    folder = root / "photos"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 90, 120)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a colour")
    return folder


@pytest.fixture
def draft_in(root: Path) -> Callable[[Any], Draft]:
    """draft_in(settings) -> a new draft of the tiny model."""

    def new(settings: Settings, text: str = TINY) -> Draft:
        return Draft.load(settings, drafts_of(settings).new(text, name="tiny").id)

    return new
