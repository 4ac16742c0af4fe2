"""The demo's preparation makes an ordinary folder, and its configuration is one that the launcher accepts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "emoji"


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "faces"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", folder], check=True)
    return folder


def test_every_picture_has_a_caption_and_the_drawings_are_credited(faces):
    pictures, captions = (sorted(path.stem for path in faces.glob(pattern)) for pattern in ("*.png", "*.txt"))
    assert pictures == captions
    assert len(pictures) == 165
    assert "CC BY-SA" in (faces / "CREDITS").read_text()


def test_a_face_looks_and_is_called_as_unicode_says(faces):
    with Image.open(faces / "1f438.png") as frog:
        assert (frog.size, frog.convert("RGB").getpixel((0, 0))) == ((64, 64), (255, 255, 255))
    assert (faces / "1f438.txt").read_text().strip() == "frog face"


def test_preparing_again_changes_nothing(faces):
    before = {path: path.stat().st_mtime_ns for path in faces.iterdir()}
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", faces], check=True)
    assert {path: path.stat().st_mtime_ns for path in faces.iterdir()} == before


def test_the_configuration_trains_sixteen_faces_a_step_on_two_processes(faces, tmp_path):
    words = [EXAMPLE / "config.toml", f"--instance_data_dir={faces}", f"--output_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "smalti", "train", *map(str, words), "--dry-run", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    plan = json.loads(done.stdout)
    assert (plan["effective_batch"], plan["launch"]["launcher"], plan["samples"]) == (16, "elastic", 165)
    assert not (tmp_path / "run").exists()
