"""Data files with the keys that those of SimpleTuner have: read with notices alone, or refused by what is not supported yet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings, strategies as st

from smalti.data import catalog_of
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.simpletuner import REFUSED, WITHOUT_EFFECT
from smalti.data.datasets.spec import ENTRY_KEYS, Catalog
from smalti.plugins import load_plugins

Entry = Mapping[str, object]
CATALOG = catalog_of(load_plugins())

TEXTS: Entry = {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "t/{model_family}"}
SIZES: Entry = {
    "resolution": 640,
    "resolution_type": "pixel_area",
    "minimum_image_size": 200,
    "maximum_image_size": 900,
    "target_downsample_size": 640,
    "crop": True,
    "crop_style": "random",
    "crop_aspect": "square",
}
LOCAL: Entry = {
    "id": "my photos",
    "type": "local",
    "instance_data_dir": "photos",
    "cache_dir_vae": "v/{model_family}/{id}",
    "caption_strategy": "filename",
    "metadata_backend": "discovery",
    **SIZES,
}
HUB: Entry = {
    **LOCAL,
    "type": "huggingface",
    "dataset_name": "user/photos",
    "metadata_backend": "huggingface",
    "image_column": "picture",
    "caption_column": "words",
    "huggingface": {"file_extension": "jpg"},
    "caption_strategy": "huggingface",
}
AREA: Entry = {"resolution": 0.5, "minimum_image_size": 0.2, "maximum_image_size": 1.5, "target_downsample_size": 1.0}
S3: Entry = {
    "type": "aws",
    "aws_bucket_name": "b",
    "aws_region_name": None,
    "aws_access_key_id": "k",
    "aws_secret_access_key": "s",
    "cache_dir": "",
}


def parse(*entries: Entry, catalog: Catalog = CATALOG) -> tuple[list[str], list[str]]:
    """The notices, and the problems without their fix."""
    names = {"model_family": "flux", "output_dir": "run"}
    specs, problems = parse_datasets(entries, where="data.json", defaults=DataDefaults(), catalog=catalog, placeholders=names)
    assert all(problem.fix for problem in problems)
    return [notice for spec in specs for notice in spec.notices], [problem.message for problem in problems]


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        ([LOCAL, TEXTS], []),
        ([{**LOCAL, **AREA, "resolution_type": "area", "repeats": 2}, TEXTS], []),
        ([{**LOCAL, "crop": False}, TEXTS], ["crop"]),
        ([{**LOCAL, "skip_file_discovery": "", "disabled": False, "metadata_backend": "json"}, TEXTS], ["metadata_backend"]),
        ([{**LOCAL, "probability": 1.0, "timestep_sampling_offset": 0.0, "vae_cache_clear_each_epoch": False}, TEXTS], []),
        ([{**LOCAL, "minimum_aspect_ratio": 0.5, "maximum_aspect_ratio": 3.0}, TEXTS], []),
        (
            [{**LOCAL, "vae_cache_clear_each_epoch": True, "preserve_data_backend_cache": True}, TEXTS],
            ["preserve_data", "vae_cache"],
        ),
        ([LOCAL, {**TEXTS, "write_batch_size": 128}], ["write_batch_size"]),
        ([LOCAL, {**LOCAL, "id": "held out", "dataset_type": "eval"}, TEXTS], []),
        ([{**LOCAL, "id": "a"}, {**LOCAL, "id": "a-crop", "crop": True, "resolution": 320}, TEXTS], []),
    ],
)
def test_files_of_images_are_read_with_notices_alone(entries: list[Entry], keys: list[str]) -> None:
    notices, problems = parse(*entries)

    assert problems == []
    assert [any(key in notice for notice in notices) for key in keys] == [True] * len(keys)
    assert len(notices) == len(keys)


@pytest.mark.parametrize("strategy", ["huggingface", "instanceprompt"])
def test_a_file_of_hub_datasets_is_read(strategy: str) -> None:
    hub = {**HUB, "caption_strategy": strategy, "instance_prompt": "a photo"}

    assert parse(hub, TEXTS)[1] == []


def test_a_list_of_urls_is_read() -> None:
    entry = {**LOCAL, "type": "csv", "csv_file": "list.csv", "csv_cache_dir": "c", "csv_caption_column": "text"}

    assert parse({**entry, "caption_strategy": "csv"}, TEXTS) == ([], [])


@pytest.mark.parametrize(
    ("entry", "problems"),
    [
        ({**HUB, "dataset_type": "video", "video": {"num_frames": 9}}, ["dataset_type 'video' is not supported yet"]),
        ({**HUB, "dataset_type": "audio", "audio": {"channels": 2}}, ["dataset_type 'audio' is not supported yet"]),
        ({**LOCAL, **S3}, ["type: 'aws' belongs to smalti-storage-s3"]),
        ({**LOCAL, "type": "webshart", "source": "x", "webshart": {}}, ["type 'webshart' is not supported yet"]),
        (
            {**LOCAL, "caption_strategy": "parquet", "metadata_backend": "parquet", "parquet": {"path": "t"}},
            ["metadata_backend: 'parquet' belongs to smalti-data"],
        ),
        ({**HUB, "dataset_config": "large", "split": "all"}, ["type: 'huggingface' belongs to smalti-data"]),
        (
            {**LOCAL, "type": "csv", "csv_file": "list.csv", "csv_cache_dir": "c", "caption_strategy": "csv"},
            ["type: 'csv' belongs to smalti-data"],
        ),
        (
            {**LOCAL, "caption_strategy": "json", "metadata_backend": "json", "json": {"path": "t.jsonl"}},
            ["metadata_backend: 'json' belongs to smalti-data"],
        ),
        (
            {**LOCAL, "caption_strategy": "tar", "metadata_backend": "tar"},
            ["metadata_backend: 'webdataset' belongs to smalti-data"],
        ),
        (
            {**LOCAL, "conditioning": {"type": "canny"}},
            ["conditioning is not supported for a dataset: conditioning images are not supported yet"],
        ),
    ],
)
def test_what_is_not_supported_yet_is_named_once(entry: Entry, problems: list[str]) -> None:
    assert parse(entry, TEXTS, catalog=Catalog())[1] == problems


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["~nobody-at-all/x", "a\0b", "{id}", "json", "aws"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from([*ENTRY_KEYS, *WITHOUT_EFFECT, *REFUSED, "type", "huggingface", "parquet", "disabled"]) | st.text(
    max_size=6
)


@settings(deadline=None)
@example([{"id": "a", "instance_data_dir": "~nobody-at-all/x", "kohya_folders": True}])
@example(
    [{"id": "a", "instance_data_dir": "x", "cache_dir_vae": "~nobody-at-all/x", "metadata_backend": "parquet", "parquet": {}}]
)
@example([{"id": "a", "instance_data_dir": "x\0", "json": {"path": "~nobody-at-all/x"}, "metadata_backend": "json"}])
@given(st.lists(st.dictionaries(keys, values, max_size=6), max_size=3))
def test_whatever_a_file_contains_it_is_read_or_has_problems_with_a_fix(entries: list[dict[str, object]]) -> None:
    names = {"model_family": None}
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(), catalog=CATALOG, placeholders=names)

    assert all(problem.message and problem.fix for problem in problems)
    assert len(specs) <= len(entries)
    assert problems or any(spec.dataset_type == "image" for spec in specs)
