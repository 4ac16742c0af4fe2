"""Masks and weights of images in a run: on one rank and on two, stopped and resumed, and after a mask was redrawn."""

import json

import pytest
from PIL import Image, ImageDraw

OPTIONS = {"max_train_steps": 6, "instance_data_dir": None, "mask_probability": 0.7}


@pytest.fixture(scope="module")
def masks(pictures, tmp_path_factory):
    """Masks of all images but four."""
    folder = tmp_path_factory.mktemp("masks")
    for path in sorted(pictures.glob("*.png"))[:20]:
        with Image.open(path) as image:
            mask = Image.new("L", image.size)
        ImageDraw.Draw(mask).ellipse((4, 4, 12 + int(path.stem) % 9, 20), fill=255)
        mask.save(folder / path.name)
    return folder


@pytest.fixture(scope="module")
def masked(pictures, masks):
    """A dataset file with these masks."""
    entry = {"id": "pictures", "instance_data_dir": str(pictures), "flip_probability": 0.5}
    path = masks.with_suffix(".json")
    path.write_text(json.dumps([{**entry, "mask_path": str(masks), "loss_weight": 0.5}]))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train, masked):
    root = tmp_path_factory.mktemp("masked")
    options = {**OPTIONS, "data_backend_config": masked}
    one = train(root / "one", **options, train_batch_size=8)
    two = {**options, "train_batch_size": 4, "num_processes": 2}
    stopped = train(root / "two", spoil="stop:0:3", **two)
    stopped_losses = stopped.losses
    return one, stopped_losses, train(root / "two", **two)


def test_losses_with_masks_do_not_depend_on_ranks_and_resumes(runs, train, masked, tmp_path):
    one, stopped_losses, two = runs
    plain = masked.with_name("plain.json")
    plain.write_text(json.dumps([{**json.loads(masked.read_text())[0], "mask_path": None}]))
    unmasked = train(tmp_path / "plain", **OPTIONS, data_backend_config=plain, train_batch_size=8)

    assert (one.code, two.code, len(stopped_losses)) == (0, 0, 3)
    assert "4 of 24 images have no mask in" in one.output
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert "mask_probability without effect: no dataset has masks" in unmasked.output
    assert all(abs(loss - other) > 1e-4 for loss, other in zip(one.losses, unmasked.losses, strict=True))


def test_a_redrawn_mask_is_a_change_of_the_data(runs, train, masks, masked):
    one = runs[0]
    with Image.open(masks / "00.png") as image:
        ImageDraw.Draw(image).rectangle((0, 0, 9, 9), fill=90)
        image.save(masks / "00.png")
    options = {**OPTIONS, "max_train_steps": 7, "data_backend_config": masked, "train_batch_size": 8}
    refused = train(one.directory, **options)
    assert (refused.code, "the data have changed: what belongs to images, such as masks, changed" in refused.output) == (
        8,
        True,
    )
    assert train(one.directory, **options, on_changed_data="continue").code == 0
