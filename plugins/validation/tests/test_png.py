"""Pictures carry their settings, and never take the place of a picture that somebody else made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from smalti import UserError
from smalti_validation.png import image_settings, save_image


def _save(path: Path, prompt: str, colour: str = "red") -> None:
    image = Image.new("RGB", (8, 4), colour)
    save_image(path, image, prompt=prompt, seed=7, step=500, config_digest="abc", run_id="run-1", guidance=4.5)


def test_a_picture_tells_how_it_was_made(tmp_path: Path) -> None:
    _save(tmp_path / "500/a.png", "a fox")
    assert image_settings(tmp_path / "500/a.png") == {
        "prompt": "a fox",
        "seed": "7",
        "step": "500",
        "config_digest": "abc",
        "run_id": "run-1",
        "guidance": "4.5",
    }


@given(prompt=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50))
def test_any_prompt_survives(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    _save(path, prompt)
    assert image_settings(path)["prompt"] == prompt


def test_a_prompt_that_png_cannot_hold_is_written_as_well_as_it_goes(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", "caf\udce9\0!")
    assert image_settings(tmp_path / "a.png")["prompt"] == "caf?!"


def test_other_programs_find_the_prompt_where_png_has_a_place_for_it(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", "ein Füchslein")
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["Description"] == "ein Füchslein"


def test_a_picture_of_the_run_may_be_drawn_again(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", "a fox")
    _save(tmp_path / "a.png", "a hen")
    assert image_settings(tmp_path / "a.png")["prompt"] == "a hen"


def test_a_picture_that_smalti_did_not_make_is_not_overwritten(tmp_path: Path) -> None:
    Image.new("RGB", (3, 3)).save(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    with pytest.raises(UserError, match="was not written by smalti"):
        _save(tmp_path / "a.png", "a fox")
    assert (tmp_path / "a.png").read_bytes() == before


def test_a_file_that_is_no_picture_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("a shopping list")
    with pytest.raises(UserError, match="cannot be read as an image"):
        _save(tmp_path / "a.png", "a fox")
    assert (tmp_path / "a.png").read_text() == "a shopping list"


def test_the_pixels_are_untouched(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", "a fox", "#123456")
    with Image.open(tmp_path / "a.png") as image:
        assert image.getcolors() == [(32, (0x12, 0x34, 0x56))]
