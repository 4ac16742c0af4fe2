"""Checkpoints, run directories and encoded data of an older version are resumed, with the losses that the older one had."""

import json
import re
import sys
import tarfile
from pathlib import Path

import pytest

from support.forked_popen import run_forked
from support.old_runs import losses, pipeline

DATA = Path(__file__).parents[1] / "data"
ARCHIVES = {
    "runs-0.1.0a": {"sharded": ("--no_fsdp_enable", "--num_processes=1", "--train_batch_size=4"), "adapter": ()},
    "runs-format-1": {"plain": ()},
    "runs-0.2.0": {"plain": ()},
}
"""Runs of each archive, with what changes when they are resumed."""
FORMATS = {"runs-0.1.0a": 2, "runs-format-1": 1, "runs-0.2.0": 2}


def encoded(place: Path) -> set[Path]:
    """Encoded texts, and the folders of latents. A key of latents has the absolute path of the image: another one here."""
    return {*place.glob("adapter/cache/texts-*/*"), *place.glob("adapter/cache/latents-*")}


@pytest.mark.parametrize(("archive", "run"), [(archive, run) for archive, runs in ARCHIVES.items() for run in runs])
def test_a_run_of_an_older_version_is_resumed_from_its_checkpoint_and_its_encoded_data(tmp_path, archive, run):
    place = tmp_path
    with tarfile.open(DATA / f"{archive}.tar.xz") as tar:
        tar.extractall(place, filter="data")
    (manifest,) = place.glob(f"{run}/checkpoints/*/manifest.json")
    assert json.loads(manifest.read_text())["version"] == FORMATS[archive]
    if run == "adapter":
        pipeline(place / "base")
    before = encoded(place)
    assert run_forked([sys.executable, "-m", "smalti", "checkpoint", "verify", run], cwd=place).returncode == 0
    words = ["train", f"{run}/config.toml", "--max_train_steps=4", "--without=plots", *ARCHIVES[archive][run]]
    done = run_forked([sys.executable, "-m", "smalti", *words], cwd=place, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(place / run) == pytest.approx(json.loads((place / "losses.json").read_text())[run], rel=1e-4)
    # No text is encoded anew: what is added is a pack that refers to the parts of the older version.
    assert before <= encoded(place)
    assert re.search("encoding .* texts", done.stdout + done.stderr) is None or run != "adapter"
    assert run_forked([sys.executable, "-m", "smalti", "checkpoint", "verify", run], cwd=place).returncode == 0
