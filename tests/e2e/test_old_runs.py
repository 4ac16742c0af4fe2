"""Checkpoints, run directories and encoded data of an older version are resumed, with the losses that the older one had."""

import json
import re
import sys
import tarfile
from pathlib import Path

import pytest

from support.forked_popen import run_forked
from support.old_runs import losses, pipeline

ARCHIVE = Path(__file__).parents[1] / "data" / "runs-0.1.0a.tar.xz"
CHANGES = {"sharded": ("--no_fsdp_enable", "--num_processes=1", "--train_batch_size=4"), "adapter": ()}


@pytest.fixture
def place(tmp_path):
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path


def encoded(place: Path) -> set[Path]:
    """Encoded texts, and the folders of latents. A key of latents has the absolute path of the image: another one here."""
    return {*place.glob("adapter/cache/texts-*/*"), *place.glob("adapter/cache/latents-*")}


@pytest.mark.parametrize("run", CHANGES)
def test_a_run_of_an_older_version_is_resumed_from_its_checkpoint_and_its_encoded_data(place, run):
    pipeline(place / "base")
    before = encoded(place)
    words = ["train", f"{run}/config.toml", "--max_train_steps=4", "--without=plots", *CHANGES[run]]
    done = run_forked([sys.executable, "-m", "smalti", *words], cwd=place, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(place / run) == pytest.approx(json.loads((place / "losses.json").read_text())[run], rel=1e-4)
    # No text is encoded anew: what is added is a pack that refers to the parts of the older version.
    assert before <= encoded(place)
    assert re.search("encoding .* texts", done.stdout + done.stderr) is None or run != "adapter"
    assert run_forked([sys.executable, "-m", "smalti", "checkpoint", "verify", run], cwd=place).returncode == 0
