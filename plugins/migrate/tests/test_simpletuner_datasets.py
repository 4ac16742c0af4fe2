"""Data files with the keys that those of SimpleTuner have: read with notices alone, or refused by what is not supported yet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings, strategies as st

from smalti.config import Dialect
from smalti.data import DatasetSpec, catalog_of
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import ENTRY_KEYS, Catalog
from smalti.plugins import load_plugins
from smalti_migrate.simpletuner.dataset_keys import REFUSED, UNSUPPORTED, WITHOUT_EFFECT
from smalti_migrate.simpletuner.dialect import SimpleTuner

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


PETS: Entry = {"id": "pets", "instance_data_dir": "pets"}


def read(*entries: Entry, catalog: Catalog = CATALOG, dialect: Dialect | None = None) -> tuple[list[DatasetSpec], list[str]]:
    """The datasets, and the problems."""
    names, chosen = {"model_family": "flux", "output_dir": "run"}, dialect or SimpleTuner()
    specs, problems = parse_datasets(
        entries, where="data.json", defaults=DataDefaults(), catalog=catalog, placeholders=names, dialect=chosen
    )
    assert all(problem.fix for problem in problems)
    return list(specs), [str(problem) for problem in problems]


def parse(*entries: Entry, catalog: Catalog = CATALOG) -> tuple[list[str], list[str]]:
    """The notices, and the problems without their place and fix."""
    specs, problems = read(*entries, catalog=catalog)
    messages = [problem.partition("\n")[0].removeprefix("data.json: ").partition(": ")[2] for problem in problems]
    return [notice for spec in specs for notice in spec.notices], messages


def spec_of(**values: object) -> DatasetSpec:
    (spec,), problems = read({**PETS, **values})
    assert not problems
    return spec


def problem_of(**values: object) -> str:
    _, (problem,) = read({**PETS, **values})
    return problem


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


def test_a_dataset_of_masks_is_read_with_the_rule_of_simpletuner() -> None:
    masks = {**LOCAL, "id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask"}
    notices, problems = parse({**LOCAL, "conditioning_data": "masks"}, masks, TEXTS)

    assert problems == []
    assert any("--mask_floor=0 --no_mask_normalise" in notice for notice in notices)


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
            ["conditioning is not supported for a dataset: conditioning images other than masks are not supported yet"],
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
    for dialect in (SimpleTuner(), Dialect()):
        specs, problems = parse_datasets(
            entries, where="", defaults=DataDefaults(), catalog=CATALOG, placeholders=names, dialect=dialect
        )

        assert all(problem.message and problem.fix for problem in problems)
        assert len(specs) <= len(entries)
        assert problems or any(spec.dataset_type == "image" for spec in specs)


def test_a_batch_size_of_a_dataset_is_refused_with_the_way_out() -> None:
    assert "all datasets share one batch size" in problem_of(train_batch_size=4)


def test_keys_without_effect_are_accepted_with_a_notice() -> None:
    notices = spec_of(preserve_data_backend_cache=True, delete_problematic_images=True).notices

    assert len(notices) == 2
    assert "nothing is ever deleted" in notices[0]
    assert "preserve_data_backend_cache has no effect: an unchanged listing keeps the index anyway" in notices[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, one in {**WITHOUT_EFFECT, **REFUSED}.items() for value in (*one.neutral, "", None, {})],
)
def test_an_external_key_that_asks_for_what_happens_is_accepted_silently(key: str, value: object) -> None:
    assert spec_of(**{key: value}).notices == ()


@pytest.mark.parametrize("key", REFUSED)
def test_an_external_key_that_changes_what_is_trained_on_is_refused_with_a_way_out(key: str) -> None:
    told = problem_of(**{key: {"enabled": True, "count": 3}})

    assert told.startswith(f"data.json: dataset 'pets': {key} is not supported for a dataset: {REFUSED[key].why}\n    fix: ")


def test_comments_and_keys_of_sources_that_are_not_chosen_are_no_errors() -> None:
    notices = spec_of(**{"_comment": "x", "//": "y", "aws_region_name": "eu", "huggingface": {"streaming": True}}).notices

    assert [notice.split(": ", 2)[2].split()[0] for notice in notices] == ["aws_region_name", "huggingface"]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in UNSUPPORTED.items() for value in values])
def test_a_value_that_is_not_supported_yet_is_named_with_what_to_do(key: str, value: str) -> None:
    _, problems = read({**PETS, key: value.upper()}, {**PETS, "id": "others"})

    fix = UNSUPPORTED[key][value]
    assert problems == [f"data.json: dataset 'pets': {key} {value!r} is not supported yet\n    fix: {fix}"]


def test_json_is_another_name_of_discovery_in_a_file_of_simpletuner() -> None:
    texts = {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "c"}
    specs, _ = read({**PETS, "metadata_backend": "json"}, texts)
    with_table, _ = read({**PETS, "metadata_backend": "json", "json": {"path": "t.jsonl"}}, texts)

    assert (specs[0].metadata_backend, specs[0].caption_strategy) == ("discovery", "textfile")
    assert "is read as 'discovery'" in specs[0].notices[0]
    assert (with_table[0].metadata_backend, with_table[0].notices) == ("json", ())


def test_images_are_not_stretched_by_a_file_of_simpletuner() -> None:
    texts = {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "c"}
    sizes = {"maximum_image_size": 512, "target_downsample_size": 2048}
    (spec, _), _ = read({**PETS, **sizes, "crop": "false", "crop_style": "corner", "crop_aspect": "square"}, texts)

    assert (spec.crop, spec.crop_aspect, spec.crop_style, spec.maximum_image_size) == (True, "preserve", "corner", 0)
    assert "crop: false is read as crop_aspect: preserve" in spec.notices[0]
    assert spec_of(crop=False).crop is False


def test_other_spellings_are_known() -> None:
    assert spec_of(is_regularization_data=True).is_regularisation_data is True
    assert spec_of(metadata_backend="filesystem").metadata_backend == "discovery"


def test_without_this_package_its_keys_are_refused_with_what_to_install() -> None:
    specs, problems = read({**PETS, "preserve_data_backend_cache": True}, dialect=Dialect())
    assert "preserve_data_backend_cache has no effect" in specs[0].notices[0]
    assert problems == []

    for key in ("vae_batch_size", "conditioning", "kohya_folders"):
        _, (problem,) = read({**PETS, key: True}, dialect=Dialect())
        assert f"unknown key {key!r}\n    fix: remove it" in problem
        assert "smalti-migrate reads those of other trainers: " in problem

    _, (problem,) = read({**PETS, "crop": False}, TEXTS, dialect=Dialect())
    assert "crop: false stretches images here, but not in files of SimpleTuner" in problem
    assert "smalti-migrate" in problem
