"""Dataset entries: what is accepted, what is refused and how, and that all problems come at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults, load_backend_config, parse_datasets
from smalti.data.datasets.spec import Catalog, DatasetSpec, unused_caches
from smalti.data.prepared import DataRules, crop_settings_of
from smalti.errors import ConfigError
from smalti.types import MetadataEntry, StorageEntry

PETS: Mapping[str, object] = {"id": "pets", "instance_data_dir": "pets"}
TABLES = Catalog(
    metadata={name: MetadataEntry(name=name, title="", factory="") for name in ("csv", "discovery", "huggingface", "json")}
)


def parse(*entries: Mapping[str, object], catalog: Catalog | None = None) -> tuple[tuple[DatasetSpec, ...], list[str]]:
    specs, problems = parse_datasets(entries, where="data.json", defaults=DataDefaults(), catalog=catalog or TABLES)
    return specs, [str(problem) for problem in problems]


def spec_of(**values: object) -> DatasetSpec:
    specs, problems = parse({**PETS, **values})
    assert not problems
    return specs[0]


def problem_of(**values: object) -> str:
    _, problems = parse({**PETS, **values})
    assert len(problems) == 1, problems
    return problems[0]


def test_a_minimal_entry_gets_the_global_options() -> None:
    specs, _ = parse_datasets([PETS], where="", defaults=DataDefaults(resolution=512, caption_strategy="filename", crop=True))

    assert (specs[0].resolution, specs[0].caption_strategy, specs[0].crop) == (512, "filename", True)


def test_a_path_is_taken_from_the_current_directory() -> None:
    assert spec_of().instance_data_dir == Path.cwd() / "pets"


@pytest.mark.parametrize(("text", "value"), [("False", False), ("false", False), ("true", True), ("TRUE", True)])
def test_booleans_in_quotes_mean_what_they_say(text: str, value: bool) -> None:
    assert spec_of(crop=text).crop is value


@pytest.mark.parametrize(
    ("entry", "options", "framing"),
    [
        ({}, {}, (True, "preserve", "center")),
        ({"crop": False}, {"crop": True}, (False, "preserve", "center")),
        ({}, {"crop": False}, (False, "preserve", "center")),
        ({}, {"crop_aspect": "square"}, (True, "square", "center")),
        ({"crop": True}, {}, (True, "square", "random")),
        ({"crop": True}, {"crop_style": "corner"}, (True, "square", "corner")),
        ({"crop": "true", "crop_aspect": "preserve"}, {}, (True, "preserve", "random")),
    ],
)
def test_images_keep_their_aspect_ratio_unless_told_otherwise(
    entry: dict[str, object], options: dict[str, Any], framing: tuple[bool, str, str]
) -> None:
    (spec,), _ = parse_datasets([{**PETS, **entry}], where="", defaults=DataDefaults(**options))

    assert (spec.crop, spec.crop_aspect, spec.crop_style) == framing


def test_several_resolutions_are_datasets_of_the_same_images() -> None:
    specs, problems = parse({**PETS, "resolution": [512, 768.0, "512"], "repeats": 2, "caption_prefix": "a"})

    assert not problems
    assert [(spec.id, spec.resolution) for spec in specs] == [("pets@512", 512), ("pets@768", 768)]
    assert specs[0].model_copy(update={"id": "x", "resolution": 1}) == specs[1].model_copy(update={"id": "x", "resolution": 1})
    assert spec_of(resolution=[512]).id == "pets"


def test_a_wrong_one_of_several_resolutions_is_named() -> None:
    assert "resolution cannot be '0'" in problem_of(resolution=[512, 0])


@pytest.mark.parametrize("key", ["aspect", "aspect_ratio", "aspect_bucket"])
def test_aspects_have_weights_under_any_of_their_names(key: str) -> None:
    spec = spec_of(crop=True, crop_aspect="random", crop_aspect_buckets=[1, {key: 1.5, "weight": 2}])

    assert spec.crop_aspect_buckets == ((1.0, 1.0), (1.5, 2.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_aspect": "closest"}, "has no aspect ratios"),
        ({"crop_aspect": "random", "crop_aspect_buckets": [{"aspect": 1, "weight": 0}]}, "has no aspect ratios"),
        ({"crop_aspect": "closest", "crop_aspect_buckets": [1], "crop": False}, "has no meaning with crop: false"),
        ({"crop_aspect_buckets": [0]}, "crop_aspect_buckets.0.0 cannot be 0"),
        ({"crop_aspect_buckets": [{"weight": 1}]}, "crop_aspect_buckets.0.0 cannot be None"),
        ({"caption_shuffle": {"counts": 3}}, "unknown key 'caption_shuffle.counts'"),
    ],
)
def test_values_that_cannot_be_used_are_named(values: dict[str, object], message: str) -> None:
    assert message in problem_of(**values)


def test_a_list_of_aspects_that_is_not_used_gets_a_notice() -> None:
    notices = spec_of(crop_aspect="square", crop_aspect_buckets=[1.5], max_upscale_threshold=0.2).notices

    assert [notice.split(": ", 2)[2].split()[0] for notice in notices] == ["crop_aspect_buckets", "max_upscale_threshold"]


def test_nothing_is_stretched_by_default() -> None:
    """A photograph of 4:3 in the bucket 576x448 of 512 pixels, which is 9:7."""
    rules = DataRules(seed=0, shape=BatchShape(train_batch_size=1, ranks=1, accumulation=1))
    framing = crop_settings_of(spec_of(resolution=512), rules)
    bucket = framing.bucket(1600, 1200)

    assert (str(bucket), framing.resized(1600, 1200, bucket)) == ("576x448", (597, 448))


def test_a_dataset_disabled_in_quotes_is_disabled_only_if_true() -> None:
    specs, problems = parse(
        {**PETS, "id": "a", "disabled": "false"}, {**PETS, "id": "b", "disable": "true"}, {**PETS, "id": "c", "disabled": True}
    )

    assert ([spec.id for spec in specs], problems) == (["a"], [])


def test_british_and_american_centres_are_one() -> None:
    assert spec_of(crop_style="Centre").crop_style == spec_of(crop_style="center").crop_style == "center"


def test_null_means_not_given() -> None:
    assert spec_of(minimum_image_size=None, max_num_samples=None).minimum_image_size == 0


def test_datasets_come_in_order_of_their_ids() -> None:
    specs, _ = parse({**PETS, "id": "b"}, {**PETS, "id": "a"})

    assert [spec.id for spec in specs] == ["a", "b"]


def test_an_unknown_key_names_the_nearest_one() -> None:
    assert problem_of(repaets=2) == "data.json: dataset 'pets': unknown key 'repaets'\n    fix: did you mean repeats?"


def test_a_cache_in_a_storage_of_a_plugin_that_is_not_active_names_the_plugin() -> None:
    cache = {"id": "texts", "type": "aws", "dataset_type": "text_embeds", "aws_bucket_name": "b", "default": True}
    _, problems = parse(PETS, cache)
    assert "'aws' belongs to smalti-storage-s3" in problems[0]


def test_entries_of_caches_that_nothing_uses_are_named() -> None:
    texts = {"id": "texts", "dataset_type": "text_embeds", "cache_dir": "c", "default": True}
    specs, _ = parse(PETS, texts, {**texts, "id": "others", "default": False})
    assert "without effect: others; texts are cached where the default text_embeds entry says" in unused_caches(specs)[0]


def test_an_id_may_have_spaces_and_letters_of_any_script() -> None:
    assert spec_of(id="my photos. of коты/2").file_name == "my-photos.-of-коты-2"
    assert spec_of(id="pets-1.a_b").file_name == "pets-1.a_b"


def test_ids_whose_files_would_have_one_name_are_refused() -> None:
    _, problems = parse({**PETS, "id": "a b"}, {**PETS, "id": "a/b"})

    assert problems == [
        "data.json: dataset 'a/b': the files of this dataset and of 'a b' have the same name, 'a-b'"
        "\n    fix: give every dataset an id of its own"
    ]


VALUES = {"model_family": "toy", "output_dir": "runs/1"}


def test_placeholders_in_paths_are_replaced() -> None:
    entry = {
        "id": "my pets",
        "instance_data_dir": "{output_dir}/photos/{id}",
        "cache_dir_vae": "cache/vae/{model_family}/{id}",
        "instance_prompt": "a {red} cat",
        "metadata_backend": "json",
        "json": {"path": "{id}.jsonl"},
    }
    (spec,), problems = parse_datasets([entry], where="", defaults=DataDefaults(), catalog=TABLES, placeholders=VALUES)

    assert problems == ()
    assert (spec.instance_data_dir, spec.cache_dir_vae) == (Path.cwd() / "runs/1/photos/my-pets", "cache/vae/toy/my-pets")
    assert (spec.json_table.path, spec.instance_prompt) == (Path.cwd() / "my-pets.jsonl", "a {red} cat")


def test_an_unknown_placeholder_is_a_problem() -> None:
    assert problem_of(cache_dir_vae="cache/{modelfamily}") == (
        "data.json: dataset 'pets': cache_dir_vae: unknown placeholder {modelfamily} in 'cache/{modelfamily}'"
        "\n    fix: known placeholders: {id}, {model_family}, {output_dir}, {env:NAME}; or rename the folder"
    )


def test_a_placeholder_without_a_value_is_a_problem_only_where_data_are_read() -> None:
    assert spec_of(cache_dir_vae="{output_dir}/cache").cache_dir_vae is None
    assert "instance_data_dir: {output_dir} has no value\n    fix: give --output_dir" in problem_of(
        instance_data_dir="{output_dir}/pets"
    )


def test_a_maximum_size_needs_a_size_to_scale_to() -> None:
    assert "maximum_image_size has no meaning without target_downsample_size" in problem_of(maximum_image_size=2048)
    assert "target_downsample_size has no meaning without maximum_image_size" in problem_of(target_downsample_size=2048)


@pytest.mark.parametrize("key", ["minimum_image_size", "maximum_image_size", "target_downsample_size"])
def test_all_sizes_are_checked_for_their_unit(key: str) -> None:
    others = {"maximum_image_size": 2048, "target_downsample_size": 2048}
    told = problem_of(**{**others, key: 0.25})

    assert f"{key} 0.25 with resolution_type 'pixel_area' is in pixels, which is too small" in told
    assert "use pixels (0.25 megapixels is 500)" in told


def test_every_problem_of_every_entry_is_reported() -> None:
    _, problems = parse(
        {"id": "a"},
        {"id": "//", "instance_data_dir": "x"},
        {**PETS, "repeats": -1, "resolution_type": "pixels", "colour": 1},
        {**PETS, "id": "pets"},
        {"instance_data_dir": "x"},
        {**PETS, "id": "v", "dataset_type": "video"},
        {**PETS, "id": "i", "caption_strategy": "instanceprompt"},
    )
    told = "\n".join(problems)

    for words in (
        "dataset 'a': instance_data_dir is missing",
        "dataset '//': id cannot be '//'\n    fix: an id has letters or digits",
        "dataset 'pets': repeats cannot be -1\n    fix: give a number >= 0",
        "resolution_type cannot be 'pixels'\n    fix: did you mean pixel? give one of pixel, area, pixel_area",
        "unknown key 'colour'",
        "this id is used twice",
        "entry 5: id is missing",
        "dataset_type cannot be 'video'\n    fix: give one of image, eval, conditioning, text_embeds, image_embeds",
        "needs an instance_prompt",
    ):
        assert words in told
    assert len(problems) == 9


def test_resolutions_in_the_wrong_unit_are_noticed() -> None:
    assert "is in megapixels, which is too large" in problem_of(resolution=1024, resolution_type="area")
    assert "is in pixels, which is too small" in problem_of(resolution=1, resolution_type="pixel")


def test_an_unknown_caption_strategy_names_the_known_ones() -> None:
    assert "known values: textfile, filename, instanceprompt, csv, huggingface, json" in problem_of(caption_strategy="blip")


def test_a_storage_that_does_not_exist_yet_is_no_advice_to_install_it() -> None:
    told = problem_of(type="webshart")
    assert ("type: 'webshart' is unknown" in told, "pip install" in told) == (True, False)


def test_a_storage_of_a_plugin_that_is_not_active_names_the_plugin() -> None:
    assert "'aws' belongs to smalti-storage-s3" in problem_of(type="aws", aws_bucket_name="b")


BOX = StorageEntry(name="box", title="", factory="", keys=("box_lid", "secret_of_the_box"))


def test_a_plugins_storage_gets_its_own_keys_unseen() -> None:
    specs, problems = parse({"id": "a", "type": "box", "secret_of_the_box": "hush"}, catalog=Catalog(storages={"box": BOX}))

    assert problems == []
    assert specs[0].storage_options == {"secret_of_the_box": "hush"}
    assert "hush" not in repr(specs[0])


def test_a_misspelt_key_of_a_plugins_storage_names_the_nearest_one() -> None:
    _, problems = parse({"id": "a", "type": "box", "box_lit": 1}, catalog=Catalog(storages={"box": BOX}))

    assert problems == ["data.json: dataset 'a': unknown key 'box_lit'\n    fix: did you mean box_lid?"]


def test_a_key_of_another_storage_is_unknown() -> None:
    catalog = Catalog(storages={"box": BOX, "local": StorageEntry(name="local", title="", factory="")})
    _, problems = parse({**PETS, "box_lid": 1}, catalog=catalog)

    assert "unknown key 'box_lid'" in problems[0]


def test_a_plugins_metadata_backend_gets_its_block_and_brings_captions() -> None:
    catalog = Catalog(metadata={name: MetadataEntry(name=name, title="", factory="") for name in ("discovery", "parquet")})
    specs, problems = parse({**PETS, "metadata_backend": "parquet", "parquet": {"path": "x"}}, catalog=catalog)

    assert problems == []
    assert (specs[0].caption_strategy, specs[0].metadata_options) == ("parquet", {"path": "x"})


def test_a_table_brings_captions_unless_the_dataset_says_otherwise() -> None:
    assert spec_of(metadata_backend="json").caption_strategy == "json"
    assert spec_of(metadata_backend="json", caption_strategy="filename").caption_strategy == "filename"


def test_captions_from_a_table_that_is_not_read_are_refused() -> None:
    assert "needs the metadata_backend of the same name" in problem_of(caption_strategy="json")


def test_columns_of_the_json_table_can_be_named() -> None:
    table = spec_of(metadata_backend="json", json={"path": "t.jsonl", "caption_column": "text"}).json_table

    assert (table.path, table.caption_column, table.width_column) == (Path.cwd() / "t.jsonl", "text", "width")


def test_entries_for_caches_are_kept_apart() -> None:
    specs, problems = parse(
        {**PETS, "text_embeds": "te", "image_embeds": "ie"},
        {"id": "te", "dataset_type": "text_embeds", "default": True, "cache_dir": "c"},
        {"id": "ie", "dataset_type": "image_embeds"},
    )

    assert problems == []
    assert {spec.id: spec.dataset_type for spec in specs} == {"ie": "image_embeds", "pets": "image", "te": "text_embeds"}


def test_a_reference_to_a_cache_that_is_not_there_is_a_problem() -> None:
    _, problems = parse({**PETS, "text_embeds": "te1"}, {"id": "te", "dataset_type": "text_embeds"})

    assert problems == [
        "data.json: dataset 'pets': text_embeds: no text_embeds entry has the id 'te1'\n    fix: did you mean te?"
    ]


def test_two_default_text_caches_are_a_problem() -> None:
    entries = [{"id": name, "dataset_type": "text_embeds", "default": True} for name in "ab"]
    _, problems = parse(PETS, *entries)

    assert "several text_embeds entries are marked as default: a, b" in problems[0]


def test_a_file_without_enabled_pictures_is_a_problem() -> None:
    _, problems = parse({**PETS, "disabled": True})

    assert "no dataset with images is enabled" in problems[0]


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"id": "a"}]', encoding="utf-8-sig")

    assert load_backend_config(path) == [{"id": "a"}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[\n  {"id": "a",}\n]', "line 2, column 14"),
        ('{"id": "a"}', "must be a list of objects"),
        ('[{"id": "a", "id": "b"}]', "'id' occurs twice"),
        ('["a"]', "must be a list of objects"),
    ],
)
def test_a_faulty_file_is_told_with_the_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=told):
        load_backend_config(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_backend_config(tmp_path / "none.json")


def test_a_toml_file_is_no_data_file_but_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[[datasets]]\nid = "a"\n')

    with pytest.raises(ConfigError, match=r"as the configuration: smalti train .*run\.toml"):
        load_backend_config(path)
