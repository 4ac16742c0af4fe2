"""The largest bucket that a run can meet: of what was scanned, of what a dataset lists, or the square."""

import json

import pytest
from PIL import Image

from smalti.cli.arguments import CommandLine
from smalti.data import scan_data
from smalti_plan.largest_bucket import buckets_key, largest_bucket


@pytest.fixture
def datasets(tmp_path):
    """datasets(**keys) -> words of a run on two images, wide and square, with these keys of the dataset."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in {"wide": (256, 64), "square": (64, 64)}.items():
        Image.new("RGB", size).save(folder / f"{name}.png")

    def words(**keys):
        entry = {"id": "photos", "type": "local", "instance_data_dir": str(folder), "caption_strategy": "filename", **keys}
        (tmp_path / "data.json").write_text(json.dumps([{"resolution": 64, "resolution_type": "pixel", **keys, **entry}]))
        line = CommandLine.parse(
            [
                *("--model_family=toy", "--resolution=32", "--resolution_type=pixel", f"--output_dir={tmp_path / 'run'}"),
                f"--data_backend_config={tmp_path / 'data.json'}",
            ]
        )
        return line.config(), line.plugins

    return words


def size(found):
    return found.bucket.width, found.bucket.height


def test_of_a_scan_it_is_the_largest_that_has_images(datasets, tmp_path):
    config, plugins = datasets()
    before = buckets_key(config, plugins)
    assert size(largest_bucket(config, plugins, 8)) == (64, 64)
    assert "smalti dataset scan" in largest_bucket(config, plugins, 8).source
    scan_data(config, plugins, 8, tmp_path / "run" / "data")
    found = largest_bucket(config, plugins, 8)
    assert size(found) == (256, 64)
    assert found.source == "the largest bucket of dataset photos, as scanned"
    assert buckets_key(config, plugins) != before


def test_listed_aspects_need_no_scan(datasets):
    config, plugins = datasets(crop=True, crop_aspect="closest", crop_aspect_buckets=[1.0, 0.5, 2.5])
    found = largest_bucket(config, plugins, 8)
    assert (size(found), found.source) == ((160, 64), "the largest bucket that dataset photos lists")


def test_square_crops_need_no_scan_either(datasets):
    assert size(largest_bucket(*datasets(crop=True, crop_aspect="square"), 8)) == (64, 64)


def test_without_datasets_it_is_a_square_at_the_resolution():
    line = CommandLine.parse(["--model_family=toy", "--resolution=0.25", "--resolution_type=area", "--output_dir=run"])
    assert size(largest_bucket(line.config(), line.plugins, 8)) == (504, 504)


def test_a_folder_that_does_not_exist_is_named(datasets, tmp_path):
    config, plugins = datasets()
    before = buckets_key(config, plugins)
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    assert largest_bucket(config, plugins, 8).source.endswith("/photos of dataset photos does not exist")
    assert buckets_key(config, plugins) != before
