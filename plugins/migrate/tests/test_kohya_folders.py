"""Folders of kohya's trainer: recognised, reported, and read as it reads them where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog, DatasetSpec
from smalti.data.prepared import DataRules, PreparedData, build_datasets, prepare
from smalti.errors import PreflightError, Problem
from smalti_migrate.kohya.folders import numbered
from smalti_migrate.simpletuner.dialect import SimpleTuner

PIXELS = Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8))


def fill(folder: Path, *names: str, **captions: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        PIXELS.save(folder / f"{name}.png")
    for name, caption in captions.items():
        file, _, extension = name.partition("__")
        (folder / f"{file}.{extension or 'txt'}").write_text(caption)


@pytest.fixture
def kohya(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    fill(root / "img" / "10_zwx cat", "a", "b", a="a cat on a chair")
    fill(root / "img" / "1_style", "c", "d", c__caption="in a style")
    fill(root / "img" / "unnumbered", "e", e="never seen")
    fill(root / "reg" / "1_cat", "f")
    return root


def parse_all(*entries: Mapping[str, object]) -> tuple[tuple[DatasetSpec, ...], tuple[Problem, ...]]:
    return parse_datasets(entries, where="data.json", defaults=DataDefaults(resolution=16), dialect=SimpleTuner())


def parse(**entry: object) -> tuple[tuple[DatasetSpec, ...], list[str]]:
    specs, problems = parse_all({"id": "cats", **entry})
    return specs, [str(problem) for problem in problems]


def data_of(specs: tuple[DatasetSpec, ...]) -> PreparedData:
    rules = DataRules(seed=0, shape=BatchShape(train_batch_size=1, ranks=1, accumulation=1), alignment=8)
    return prepare(build_datasets(specs, Catalog()), rules)


def test_the_names_say_how_often_an_image_is_seen_and_its_caption(kohya: Path) -> None:
    specs, problems = parse(instance_data_dir=str(kohya), kohya_folders=True)
    data = data_of(specs)
    captions = {index.key(row): index.captions(row) for index in data.indexes for row in range(len(index))}

    assert problems == []
    assert [(spec.id, spec.repeats, spec.instance_prompt) for spec in specs] == [
        ("cats/10_zwx cat", 9, "zwx cat"),
        ("cats/1_style", 0, "style"),
    ]
    assert captions == {
        "a.png": ("a cat on a chair",),
        "b.png": ("zwx cat",),
        "c.png": ("in a style",),
        "d.png": ("style",),
    }
    assert sum(count.total for count in data.counts) == 10 + 10 + 1 + 1
    assert [notice.split(": ")[2] for notice in data.notices] == [
        "kohya_folders leaves out, because they are regularisation images (is_regularisation_data)",
        "kohya_folders leaves out, because their names have no number",
    ]


def test_the_numbered_folders_may_be_in_the_folder_or_be_the_folder(kohya: Path) -> None:
    inside, _ = parse(instance_data_dir=str(kohya / "img"), kohya_folders=True)
    itself, _ = parse(instance_data_dir=str(kohya / "img" / "10_zwx cat"), kohya_folders="true")

    assert [spec.repeats for spec in (*inside, *itself)] == [9, 0, 9]


def test_keys_of_the_entry_win(kohya: Path) -> None:
    specs, _ = parse(instance_data_dir=str(kohya), kohya_folders=True, caption_strategy="instanceprompt", instance_prompt="x")

    assert {index.captions(0) for index in data_of(specs).indexes} == {("x",)}


def test_repeats_in_two_places_are_refused(kohya: Path) -> None:
    _, problems = parse(instance_data_dir=str(kohya), kohya_folders=True, repeats=3)

    assert "kohya_folders takes the repeats from the names of the folders" in problems[0]


def test_a_folder_without_numbers_is_refused(kohya: Path) -> None:
    _, problems = parse(instance_data_dir=str(kohya / "img" / "unnumbered"), kohya_folders=True)

    assert "no folder with a name like '10_zwx cat'" in problems[0]


def test_without_the_key_a_notice_has_entries_that_say_the_same(kohya: Path) -> None:
    specs, _ = parse(instance_data_dir=str(kohya), caption_strategy="filename")
    (notice,) = data_of(specs).notices
    entries = json.loads(f"[{notice.partition('or these entries: ')[2]}]")
    written, problems = parse_all(*entries)

    assert "Regularisation images are trained on like the others." in notice
    assert problems == ()
    assert [(spec.repeats, spec.instance_prompt) for spec in written] == [(0, "style"), (9, "zwx cat")][::-1]
    assert [spec.notices for spec in written] == [(), ()]


def test_without_captions_the_error_names_the_option(tmp_path: Path) -> None:
    fill(tmp_path / "10_zwx cat", "a")
    specs, _ = parse(instance_data_dir=str(tmp_path))

    with pytest.raises(PreflightError, match="No captions found") as raised:
        data_of(specs)
    assert "--kohya_folders" in str(raised.value.fix)


@pytest.mark.parametrize("name", ["2024_summer", "01_first"])
def test_years_and_positions_are_no_repeats(tmp_path: Path, name: str) -> None:
    fill(tmp_path / name, "a")
    (spec,), _ = parse(instance_data_dir=str(tmp_path))

    assert spec.notices == ()


@pytest.mark.parametrize("name", ["cat", "0_cat", "x_cat", "10cat", "-1_cat"])
def test_other_names_have_no_number(name: str) -> None:
    assert numbered(Path(name)) is None


def test_a_caption_extension_is_one() -> None:
    _, problems = parse(instance_data_dir="x", caption_extension="caption")

    assert "caption_extension cannot be 'caption'\n    fix: give the extension of text files" in problems[0]
