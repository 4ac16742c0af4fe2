"""`smalti dataset unpack`, as a command below `smalti dataset`."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from smalti.cli.entry import smalti
from smalti.config import resolve
from smalti.data import PreparedData, scan_data
from smalti.errors import ConfigError, ExitCode, MissingPlugin
from smalti.plugins import load_plugins, schema_of, selection_of


def run(*words: object) -> str:
    return CliRunner().invoke(smalti, ["dataset", *map(str, words)], catch_exceptions=False).output


def test_what_was_unpacked_can_be_checked_with_the_command_that_is_shown(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "pet.png")
    data = (tmp_path / "pet.png").read_bytes()
    images = [{"bytes": data, "path": f"{number}.png"} for number in range(10)]
    images[3] = {"bytes": b"", "path": "gone.png"}
    folder = tmp_path / "hub" / "default" / "partial-train"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"image": images, "text": ["a pet"] * 10}), folder / "0000.parquet")
    report = run("unpack", tmp_path / "hub", "--to", tmp_path / "my photos")
    *_, command = report.splitlines()
    words = shlex.split(command.removeprefix("next: smalti dataset "))

    assert "9 images in" in report
    assert "left out: 0000.parquet, row 3: not an image that can be read" in report
    assert "the Hub converts only the first part of a large dataset" in report
    assert "9 batches in the first epoch" in run(*words, "--resolution=16", "--aspect_bucket_alignment=8")


def test_it_is_in_the_list_of_the_group() -> None:
    assert "unpack Write the images of parquet files into a folder, with their captions." in " ".join(run("--help").split())


def test_a_truncated_picture_is_found_by_a_full_scan_and_a_copied_eval_picture_by_every_scan(tmp_path: Path) -> None:
    for folder, names in (("pets", "abcd"), ("held", "xy")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            pixels = bytes((7 * place + 31 * number + ord(folder[0])) % 251 for place in range(3 * 64 * 64))
            Image.frombytes("RGB", (64, 64), pixels).save(tmp_path / folder / f"{name}.jpg")
            (tmp_path / folder / f"{name}.txt").write_text("a pet")
    (tmp_path / "held" / "y.jpg").write_bytes((tmp_path / "pets" / "b.jpg").read_bytes())
    (tmp_path / "pets" / "c.jpg").write_bytes((tmp_path / "pets" / "c.jpg").read_bytes()[:-600])
    entries = [{"id": name, "instance_data_dir": str(tmp_path / name)} for name in ("pets", "held")]
    entries[1]["dataset_type"] = "eval"
    (tmp_path / "data.json").write_text(json.dumps(entries))
    words = ("scan", f"--data_backend_config={tmp_path / 'data.json'}")

    quick, full = run(*words), run(*words, "--full")
    assert "pets: 4 images, 0 unusable" in quick
    assert "--full decodes every image" in quick
    assert "pets: 3 images, 1 unusable" in full
    assert "c.jpg: the image is damaged: image file is truncated" in full
    assert "only the headers" not in full
    for text in (quick, full):
        assert "1 held-out image is also trained on" in text
        assert "    held/y.jpg is pets/b.jpg\n" in text
    report = json.loads(run(*words, "--full", "--json"))
    assert [one["usable"] for one in report["datasets"]] == [3, 2]
    assert report["held_out_in_training"] == [{"held_out": "held/y.jpg", "training": "pets/b.jpg"}]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed."""
    monkeypatch.setenv("SMALTI_WITHOUT", "data")
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)


def scan(*flags: str) -> PreparedData:
    plugins = load_plugins(selection_of((), None, os.environ))
    return scan_data(resolve(schema_of(plugins), flags), plugins, 8, None)


def test_without_the_package_a_table_is_refused_with_what_to_install(absent: None, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "pet.png")
    (tmp_path / "metadata.jsonl").write_text('{"filename": "pet.png", "caption": "a pet"}')
    entry = {"id": "pets", "instance_data_dir": str(tmp_path), "metadata_backend": "json"}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=r"'json' belongs to smalti-data\n    fix: pip install .+data'?$") as caught:
        scan(f"--data_backend_config={tmp_path / 'data.json'}")
    assert caught.value.exit_code == ExitCode.MISSING_PLUGIN


def test_without_the_package_a_folder_with_text_files_is_a_dataset(absent: None, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "pet.png")
    (tmp_path / "pet.txt").write_text("a pet")
    assert len(scan(f"--instance_data_dir={tmp_path}").indexes[0]) == 1


def test_without_the_package_the_command_says_what_to_install(absent: None) -> None:
    with pytest.raises(MissingPlugin, match=r"the command 'dataset' belongs to smalti-data\n  fix: pip install .+data'?$"):
        run("scan")
