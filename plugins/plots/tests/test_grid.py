"""The sheet of images: every image is on it, large enough, with its caption below."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smalti import ValidationImage, ValidationResult
from smalti.errors import UserError
from smalti_plots.grid import MIN_WIDTH, image_grid
from smalti_plots.plugin import Plots
from smalti_validation.png import image_settings

_COLOURS = [(200, 30, 30), (30, 160, 30), (40, 40, 220), (220, 200, 20), (20, 200, 210)]


def _images(folder: Path, *sizes: tuple[int, int]) -> list[Path]:
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.png")
        Image.new("RGB", size, _COLOURS[number]).save(paths[-1])
    return paths


def _areas(path: Path) -> dict[tuple[int, int, int], int]:
    with Image.open(path) as sheet:
        colours = sheet.convert("RGB").getcolors(1 << 24)
    counts = {colour: count for count, colour in colours or []}
    return {colour: counts[colour] for colour in _COLOURS if colour in counts}


def _ink(path: Path) -> int:
    """How many dark pixels there are: letters."""
    with Image.open(path) as sheet:
        colours = sheet.convert("RGB").getcolors(1 << 24) or []
    return sum(count for count, colour in colours if isinstance(colour, tuple) and max(colour) < 110)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_image_is_on_the_sheet_whole(tmp_path: Path, count: int) -> None:
    images = _images(tmp_path, *[(256, 256)] * count)
    image_grid(images, [""] * count, tmp_path / "grid.png")
    assert _areas(tmp_path / "grid.png") == dict.fromkeys(_COLOURS[:count], 256 * 256)


def test_small_images_are_enlarged_by_a_whole_factor(tmp_path: Path) -> None:
    image_grid(_images(tmp_path, (32, 32)), [""], tmp_path / "grid.png")
    assert _areas(tmp_path / "grid.png") == {_COLOURS[0]: MIN_WIDTH**2}


def test_the_scale_can_be_chosen(tmp_path: Path) -> None:
    image_grid(_images(tmp_path, (32, 16)), [""], tmp_path / "grid.png", scale=2)
    assert _areas(tmp_path / "grid.png") == {_COLOURS[0]: 64 * 32}


def test_images_of_different_shapes_share_a_sheet(tmp_path: Path) -> None:
    image_grid(_images(tmp_path, (256, 192), (192, 256), (256, 256)), ["", "", ""], tmp_path / "grid.png")
    assert list(_areas(tmp_path / "grid.png").values()) == [256 * 192, 192 * 256, 256 * 256]


def test_the_number_of_columns_can_be_chosen(tmp_path: Path) -> None:
    images = _images(tmp_path, *[(200, 200)] * 4)
    for columns in (1, 4):
        image_grid(images, [""] * 4, tmp_path / f"grid-{columns}.png", columns=columns)
    with Image.open(tmp_path / "grid-1.png") as column, Image.open(tmp_path / "grid-4.png") as row:
        assert column.height > 800 > row.height
        assert row.width > 800 > column.width


def test_a_caption_is_drawn_below_its_image(tmp_path: Path) -> None:
    images = _images(tmp_path, (200, 200))
    for name, caption in (("with", "a fox"), ("without", "")):
        image_grid(images, [caption], tmp_path / f"{name}.png")
    assert _ink(tmp_path / "with.png") > 50 > _ink(tmp_path / "without.png")


def test_a_long_caption_takes_three_lines_and_no_more(tmp_path: Path) -> None:
    images = _images(tmp_path, (200, 200))
    heights = []
    for words in (1, 12, 100, 1000):
        image_grid(images, ["many words " * words], tmp_path / "grid.png")
        with Image.open(tmp_path / "grid.png") as sheet:
            heights.append(sheet.height)
    assert heights[0] < heights[1] == heights[2] == heights[3]


def test_a_word_wider_than_the_image_is_broken_and_stays_below_it(tmp_path: Path) -> None:
    image_grid(_images(tmp_path, (200, 200)), ["W" * 40], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as sheet:
        margin = sheet.convert("L").crop((sheet.width - 8, 0, sheet.width, sheet.height))
        assert min(margin.tobytes()) > 200


def test_captions_and_names_are_in_the_file_whole(tmp_path: Path) -> None:
    captions = ["ein Füchslein " * 50, ""]
    image_grid(_images(tmp_path, (32, 32), (32, 32)), captions, tmp_path / "grid.png", title="step 5")
    settings = image_settings(tmp_path / "grid.png")
    assert (settings["title"], json.loads(settings["captions"]), json.loads(settings["images"])) == (
        "step 5",
        captions,
        ["0.png", "1.png"],
    )


def test_a_transparent_image_lies_on_paper(tmp_path: Path) -> None:
    Image.new("RGBA", (200, 200), (0, 0, 0, 0)).save(tmp_path / "a.png")
    image_grid([tmp_path / "a.png"], [""], tmp_path / "grid.png")
    assert _ink(tmp_path / "grid.png") == 0


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(UserError, match=r"a\.png cannot be read as an image"):
        image_grid([tmp_path / "a.png"], [""], tmp_path / "grid.png")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_an_image_is_beside_that_of_the_model_before_training(tmp_path: Path, count: int) -> None:
    plots, folder = Plots(), tmp_path / "samples"
    plots._directory = tmp_path
    folder.mkdir()
    images = []
    for number in range(count):
        base, path = folder / f"base-{number}.png", folder / f"{number}.png"
        Image.new("RGB", (256, 256), _COLOURS[number]).save(base)
        Image.new("RGB", (256, 256), _COLOURS[number]).save(path)
        images.append(ValidationImage(prompt="a fox", seed=number, path=path, base=base))
    plots.on_validation(ValidationResult(step=4, images=tuple(images), folder=folder))
    with Image.open(folder / "grid.png") as sheet:
        rows = np.asarray(sheet.convert("RGB"))
    for colour in _COLOURS[:count]:
        found = (rows == colour).all(axis=2)
        assert found.sum() == 2 * 256 * 256
        assert found.any(axis=1).sum() == 256, "the two are in one row"
