"""A run with so many samples that their order is computed: the same on another number of ranks, and resumed."""

import json
import os

import pytest
from PIL import Image

from smalti.data.order import LIMIT
from support.whole import only_whole

ROWS = LIMIT + 4464
STEPS = 6


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    """A table of images, which are hard links to a few files."""
    folder = tmp_path_factory.mktemp("large")
    images = folder / "images"
    images.mkdir()
    lines = []
    for number in range(ROWS):
        kind, name = number % 7, f"{number:06}.png"
        if number < 7:
            Image.new("RGB", (24, 24), (30 * kind, 255 - 30 * kind, 99)).save(images / name)
        else:
            os.link(images / f"{kind:06}.png", images / name)
        lines.append(f'{{"filename": "{name}", "caption": "number {number % 50}", "width": 24, "height": 24}}')
    (images / "metadata.jsonl").write_text("\n".join(lines))
    entry = {"id": "large", "instance_data_dir": str(images), "metadata_backend": "json", "caption_strategy": "json"}
    file = folder / "data.json"
    file.write_text(json.dumps([entry | {"minimum_image_size": 0}]))
    yield file
    for path in images.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train, launch, data_file):
    """A whole run on one rank, and one that begins on two ranks and is resumed on one."""
    root = tmp_path_factory.mktemp("runs")
    options = {"instance_data_dir": None, "data_backend_config": data_file, "vae_cache_disable": True, "probe": False}
    whole = train(root / "whole", **options, train_batch_size=4, max_train_steps=STEPS)
    first = launch(root / "resumed", **options, train_batch_size=2, num_processes=2, max_train_steps=3)
    last = train(root / "resumed", **options, train_batch_size=4, max_train_steps=STEPS)
    for run in (whole, first, last):
        assert run.code == 0, run.output
    return whole, last


@only_whole("tests/unit/data/test_order.py::test_batches_of_a_large_epoch_are_computed_and_complete")
def test_samples_are_the_same_on_other_ranks_and_after_a_resume(runs):
    whole, resumed = runs
    assert len(whole.losses) == STEPS
    assert len(set(whole.losses)) == STEPS
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)


@only_whole("tests/unit/data/test_order.py::test_batches_of_a_large_epoch_are_computed_and_complete")
def test_checkpoints_name_the_version_of_the_order(runs):
    states = [json.loads((run.directory / "checkpoints" / f"step-{STEPS:08}" / "state.json").read_text()) for run in runs]
    orders = [state["trainer"]["data"] for state in states]
    assert orders[0] == orders[1]
    assert orders[0]["version"] == 2
