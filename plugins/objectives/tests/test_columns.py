"""Masks and weights of images: where they come from, what a visit sees of them, and what a scan says of them."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet

from smalti.data import (
    BUILT_IN_METADATA,
    BUILT_IN_STORAGES,
    Bucket,
    Catalog,
    DataDefaults,
    Loader,
    LocalStorage,
    MicroBatch,
    PreparedData,
    build_datasets,
    parse_datasets,
    prepare,
)
from smalti.data.batch_check import BatchShape
from smalti.data.encoded import fixed_crop
from smalti.data.prepared import DataRules, load_datasets
from smalti.errors import ConfigError, PreflightError, UserError
from smalti.types import World
from smalti_objectives.columns.masks import block_means, scaled_mask
from smalti_objectives.mask_options import MaskOptions
from smalti_objectives.plugin import COLUMNS

CATALOG = Catalog.of(BUILT_IN_STORAGES, BUILT_IN_METADATA, COLUMNS)
DEFAULTS = {name: field.default for name, field in MaskOptions.model_fields.items()}
SCALE = 4
"""Pixels of a side of a latent."""
CENTRE = {"caption_strategy": "filename", "crop": True, "crop_aspect": "square", "crop_style": "center"}
RANDOM = {**CENTRE, "crop_style": "random", "flip_probability": 0.5}


def pattern(number: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Noise, another one for each number."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (size[1], size[0]), dtype=np.uint8))


def masked(folder: Path, count: int = 8) -> Path:
    """Images that look like their masks, which are in the folder `masks` beside this one."""
    for place in (folder, folder.with_name("masks")):
        place.mkdir(parents=True)
        for number in range(count):
            pattern(number).convert("RGB").save(place / f"{number:03}.png")
    return folder


def specs_of(folder: Path, *others: dict[str, object], options: dict[str, object] = MappingProxyType({}), **keys: object):
    entry = {"id": folder.name, "instance_data_dir": str(folder), **CENTRE, **keys}
    defaults, option = DataDefaults(resolution=16), {**DEFAULTS, **options}.get
    specs, problems = parse_datasets([entry, *others], where="", defaults=defaults, catalog=CATALOG, option=option)
    assert not problems, problems
    return specs


def data_of(folder: Path, *others: dict[str, object], run: Path | None = None, budget: float = 0.01, **keys: object):
    datasets = build_datasets(specs_of(folder, *others, **keys), CATALOG, run)
    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    return prepare(datasets, DataRules(seed=3, shape=shape, alignment=8, error_budget=budget))


def micros(data: PreparedData, count: int = 6, world: World = World(), **options: object) -> list[MicroBatch]:  # noqa: B008
    shape = {"latent_shape": lambda width, height: (4, height // SCALE, width // SCALE)}
    with Loader(data, world=world, micro_batch=4 // world.size, **shape, **options) as loader:
        return [batch.micro[0] for batch in islice(loader, count)]


def write_table(path: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case extension:
            csv.write_csv(table, path, csv.WriteOptions(delimiter="," if extension == ".csv" else "\t"))


def masks(data: PreparedData, **options: object) -> dict[str, torch.Tensor]:
    """The mask of each image."""
    return {key: mask for one in micros(data, **options) for key, mask in zip(one.keys, one.columns["mask"], strict=True)}


def seen(micro: MicroBatch) -> torch.Tensor:
    """The block means of the images, which look like their masks."""
    grey = ((micro.pixels[:, 0] + 1) * 127.5).round().numpy().astype(np.uint8)
    return torch.stack([torch.from_numpy(block_means(image, (16 // SCALE, 16 // SCALE))) for image in grey])[:, None]


def test_block_means_are_exact() -> None:
    mask = np.random.default_rng(0).integers(0, 256, (12, 8), dtype=np.uint8)
    exact = mask.astype(np.float64).reshape(3, 4, 2, 4).mean((1, 3))
    assert (block_means(mask, (2, 3)) == np.floor(exact + 0.5)).all()


@pytest.mark.parametrize(
    "image",
    [
        Image.new("L", (4, 2), 128),
        Image.new("RGB", (4, 2), (128, 128, 128)),
        Image.new("RGB", (4, 2), (128, 128, 128)).convert("P", palette=Image.Palette.ADAPTIVE),
        Image.new("LA", (4, 2), (128, 0)),
        Image.fromarray(np.full((2, 4), 128 * 257, dtype=np.uint16)),
    ],
    ids=lambda image: image.mode,
)
def test_the_brightness_of_a_mask_of_any_mode_counts(image: Image.Image) -> None:
    file = io.BytesIO()
    image.save(file, "png")
    assert (scaled_mask(file.getvalue(), (8, 4), (8, 4)) == np.full((4, 8), 128)).all()


@pytest.mark.parametrize("framing", [CENTRE, RANDOM])
def test_a_visit_sees_the_same_part_of_image_and_mask_in_the_same_direction(tmp_path: Path, framing: dict[str, object]) -> None:
    data = data_of(masked(tmp_path / "pets"), mask_path=str(tmp_path / "masks"), **framing)
    found = micros(data)

    assert found[0].columns["mask"].shape == (4, 1, 16 // SCALE, 16 // SCALE)
    assert all(torch.equal(one.columns["mask"], seen(one)) for one in found)
    rows = {(key, tuple(mask.flatten().tolist())) for one in found for key, mask in zip(one.keys, seen(one), strict=True)}
    assert (len(rows) > 8) == (framing is RANDOM)


class Pixels:
    """Stands in for the cache of latents: the crop of an image is its latent."""

    broken = frozenset[int]()

    def __init__(self, data: PreparedData) -> None:
        self._data = data

    def get(self, sample: int, bucket: Bucket, *, flipped: bool = False):
        image, offset = fixed_crop(self._data, sample, bucket, flipped=flipped)
        return torch.from_numpy(np.ascontiguousarray(image)), offset

    def get_many(self, images, bucket: Bucket):
        return [self.get(sample, bucket, flipped=flipped) for sample, flipped in images]


def test_masks_fit_cached_latents(tmp_path: Path) -> None:
    data = data_of(masked(tmp_path / "pets"), mask_path=str(tmp_path / "masks"), **RANDOM)
    for one in micros(data, latents=Pixels(data)):
        grey = one.latents[:, 0].numpy()
        assert torch.equal(
            one.columns["mask"][:, 0], torch.stack([torch.from_numpy(block_means(each, (4, 4))) for each in grey])
        )


def test_ranks_have_the_masks_of_their_images(tmp_path: Path) -> None:
    data = data_of(masked(tmp_path / "pets"), mask_path=str(tmp_path / "masks"), **RANDOM)
    alone = torch.cat([one.columns["mask"] for one in micros(data)])
    shared = zip(*(micros(data, world=World(rank=rank, size=2)) for rank in (0, 1)), strict=True)
    assert torch.equal(alone, torch.cat([one.columns["mask"] for pair in shared for one in pair]))
    assert torch.equal(alone[8:], torch.cat([one.columns["mask"] for one in micros(data, 4, position=2)]))


def test_masks_lie_beside_the_images_in_another_folder_or_in_another_dataset(tmp_path: Path) -> None:
    folder = masked(tmp_path / "pets")
    other = {
        "id": "m",
        "dataset_type": "conditioning",
        "conditioning_type": "mask",
        "instance_data_dir": str(tmp_path / "masks"),
    }
    elsewhere, named = (
        masks(data_of(folder, mask_path=str(tmp_path / "masks"))),
        masks(data_of(folder, other, conditioning_data="m")),
    )
    for number in range(8):
        pattern(number).save(folder / f"{number:03}-masklabel.png")
    beside = masks(data_of(folder, mask_suffix="-masklabel.png"))

    assert len(elsewhere) == 8
    for found in (named, beside):
        assert found.keys() == elsewhere.keys()
        assert all(torch.equal(found[key], elsewhere[key]) for key in found)


def test_opacity_is_the_mask_of_images_without_a_file_and_colours_stay_on_white(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    folder.mkdir()
    for number in range(4):
        image = Image.new("RGBA", (16, 16), (10, 20, 30, 0 if number == 0 else 255))
        (image.convert("RGB") if number == 1 else image).save(folder / f"{number}.png")
    Image.new("L", (16, 16), 51).save(folder / "2.mask.png")
    data = data_of(folder, alpha_mask=True, mask_suffix=".mask.png")
    found = micros(data, 1)[0]

    levels = {key: int(mask.unique()) for key, mask in zip(found.keys, found.columns["mask"], strict=True)}
    assert levels == {"pets/0.png": 0, "pets/1.png": 255, "pets/2.png": 51, "pets/3.png": 255}
    assert found.pixels[found.keys.index("pets/0.png")].unique().tolist() == [1.0]
    assert data.notices == (f"dataset 'pets': 3 of 4 images have no mask in {folder}; their opacity is the mask",)


def test_images_without_a_mask_count_fully_or_cannot_be_used(tmp_path: Path) -> None:
    folder = masked(tmp_path / "pets")
    (tmp_path / "masks/003.png").unlink()
    data = data_of(folder, mask_path=str(tmp_path / "masks"))
    assert masks(data)["pets/003.png"].unique().tolist() == [255]
    assert data.notices == (f"dataset 'pets': 1 of 8 images have no mask in {tmp_path / 'masks'}; they are trained as a whole",)

    required = data_of(folder, mask_path=str(tmp_path / "masks"), mask_required=True)
    assert [(one.key, one.reason) for one in required.quarantined] == [("003.png", f"no mask in {tmp_path / 'masks'}")]
    with pytest.raises(PreflightError, match="no mask in"):
        data_of(folder, mask_path=str(tmp_path / "masks"), mask_required=True, budget=0)
    for path in (tmp_path / "masks").iterdir():
        path.rename(path.with_name(f"x{path.name}"))
    with pytest.raises(UserError, match="8 of 8 images have no mask"):
        data_of(folder, mask_path=str(tmp_path / "masks"))


BLACK, WHITE = "it is black everywhere, and mask_floor is 0", "it is white everywhere, and mask_floor is 0"


@pytest.mark.parametrize(
    ("options", "keys", "left_out"),
    [
        ({"mask_floor": 0.0}, {}, {"002.png": BLACK}),
        ({"mask_floor": 0.0}, {"mask_invert": True}, {"005.png": WHITE}),
        ({}, {}, {}),
        ({"mask_floor": 0.0, "mask_probability": 0.9}, {}, {}),
        ({"mask_floor": 0.0, "prior_outside_mask": 0.5}, {}, {}),
    ],
)
def test_images_of_which_no_place_counts_are_no_samples_of_a_run(
    tmp_path: Path, options: dict[str, object], keys: dict[str, object], left_out: dict[str, str]
) -> None:
    folder, run, keys = masked(tmp_path / "pets"), tmp_path / "run", {"mask_path": str(tmp_path / "masks"), **keys}
    for number, brightness in ((2, 0), (5, 255)):
        Image.new("RGB", (24, 16), (brightness,) * 3).save(tmp_path / f"masks/{number:03}.png")
    data = data_of(folder, run=run, budget=4, options=options, **keys)

    assert {one.key: one.reason for one in data.quarantined} == {
        key: f"its mask cannot be used: {reason}" for key, reason in left_out.items()
    }
    said = [notice for notice in data.notices if "are unusable" in notice]
    assert [notice.startswith("1 samples are unusable") for notice in said] == [True] * len(left_out)
    assert masks(data).keys() == {f"pets/{number:03}.png" for number in range(8)} - {f"pets/{key}" for key in left_out}
    loaded = prepare(
        load_datasets(specs_of(folder, options=options, **keys), CATALOG, run),
        DataRules(seed=3, shape=BatchShape(train_batch_size=4, ranks=1, accumulation=1), alignment=8, error_budget=4),
    )
    assert loaded.identity == data.identity == data_of(folder, run=run, budget=4, options=options, **keys).identity
    alone = [key for one in micros(data) for key in one.keys]
    shared = zip(*(micros(loaded, world=World(rank=rank, size=2)) for rank in (0, 1)), strict=True)
    assert [key for pair in shared for one in pair for key in one.keys] == alone
    assert [key for one in micros(loaded, 4, position=2) for key in one.keys] == alone[8:]


def test_more_images_without_a_place_that_counts_than_the_budget_allows_are_refused(tmp_path: Path) -> None:
    folder = masked(tmp_path / "pets")
    for number in (2, 3):
        Image.new("L", (24, 16)).save(tmp_path / f"masks/{number:03}.png")
    with pytest.raises(PreflightError, match=f"(?s)2 samples cannot be used.*{BLACK}.*--data_error_budget"):
        data_of(folder, options={"mask_floor": 0.0}, mask_path=str(tmp_path / "masks"))


def test_a_wholly_transparent_image_is_replaced_where_nothing_of_it_counts(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    folder.mkdir()
    for number in range(4):
        Image.new("RGBA", (16, 16), (10, 20, 30, 255 if number else 0)).save(folder / f"{number}.png")
    data = data_of(folder, options={"mask_floor": 0.0}, alpha_mask=True, budget=2)
    errors = data.error_budget()
    assert masks(data, errors=errors).keys() == {"pets/1.png", "pets/2.png", "pets/3.png"}
    assert [item.reason for item in errors.items] == [f"its mask cannot be used: {BLACK}"]


def test_an_image_whose_mask_cannot_be_used_is_recorded_and_replaced(tmp_path: Path) -> None:
    folder = masked(tmp_path / "pets")
    (tmp_path / "masks/001.png").write_bytes(b"no image")
    pattern(2, (16, 24)).save(tmp_path / "masks/002.png")
    data = data_of(folder, mask_path=str(tmp_path / "masks"), budget=4)
    errors = data.error_budget()
    found = masks(data, errors=errors)

    assert found.keys() == {f"pets/{number:03}.png" for number in (0, 3, 4, 5, 6, 7)}
    assert {item.key: item.reason for item in errors.items} == {
        "001.png": "its mask cannot be used: not a readable image: unknown format",
        "002.png": "its mask cannot be used: its size is 16x24, not of the aspect ratio of the image, 24x16",
    }


def test_datasets_without_a_column_have_its_neutral_value_and_runs_without_it_have_no_such_column(tmp_path: Path) -> None:
    pets, cars = masked(tmp_path / "pets", 4), masked(tmp_path / "more" / "cars", 4)
    alone = micros(data_of(cars))[0].columns
    plain = {"id": "cars", "instance_data_dir": str(cars), **CENTRE}
    values = {"loss_weight": 0.25, "mask_path": str(tmp_path / "masks")}
    found = {
        key: (float(weight), mask.unique().tolist() == [255])
        for one in micros(data_of(pets, plain, **values), 8)
        for key, weight, mask in zip(one.keys, one.columns["loss_weight"], one.columns["mask"], strict=True)
    }
    assert alone == {}
    expected = {f"pets/{number:03}.png": (0.25, False) for number in range(4)}
    assert found == expected | {f"cars/{number:03}.png": (1.0, True) for number in range(4)}


def test_a_redrawn_mask_changes_the_data_of_a_run_and_opens_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run, keys = masked(tmp_path / "pets"), tmp_path / "run", {"mask_path": str(tmp_path / "masks")}
    plain = data_of(folder, run=run).identity
    opened: list[str] = []
    read = LocalStorage.read_range
    monkeypatch.setattr(LocalStorage, "read_range", lambda self, key, *at: opened.append(key) or read(self, key, *at))
    first = data_of(folder, run=run, **keys).identity
    Image.new("L", (24, 16)).save(tmp_path / "masks/005.png")
    second = data_of(folder, run=run, **keys)
    (loaded,) = load_datasets(specs_of(folder, **keys), CATALOG, run)

    assert opened == []
    assert len({plain.samples, first.samples, second.identity.samples}) == 3
    assert plain.order == first.order == second.identity.order
    assert loaded.index.digests == second.indexes[0].digests
    assert data_of(folder, run=run).identity.samples == plain.samples


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_table_has_a_weight_for_each_image(tmp_path: Path, extension: str) -> None:
    folder, path = masked(tmp_path / "pets", 4), (tmp_path / "weights").with_suffix(extension)
    rows = [{"filename": "000.png", "w": 0.5}, {"filename": "003", "w": 2}, {"filename": "gone.png", "w": 9}]
    write_table(path, rows)
    data = data_of(folder, loss_weight=0.75, loss_weight_table={"path": str(path), "weight_column": "w"})
    found = {
        key: float(weight) for one in micros(data) for key, weight in zip(one.keys, one.columns["loss_weight"], strict=True)
    }
    assert found == {"pets/000.png": 0.5, "pets/001.png": 0.75, "pets/002.png": 0.75, "pets/003.png": 2.0}
    assert data.notices == (f"dataset 'pets': 2 of 4 images have no weight in {path}; theirs is loss_weight: 0.75",)
    write_table(path, [*rows[:2], {"filename": "001.png", "w": 1}])
    assert data_of(folder, loss_weight_table={"path": str(path), "weight_column": "w"}).identity != data.identity


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"name": "000.png", "loss_weight": 1}], "weights cannot be read from"),
        ([{"filename": "000.png", "loss_weight": "much"}], "weights cannot be read from"),
        ([{"filename": "000.png", "loss_weight": -1}], "000.png has -1"),
        ([{"filename": "x.png", "loss_weight": 1}], "has a weight of none of its 4 images"),
        ([], "weights cannot be read from"),
    ],
)
def test_a_table_of_weights_that_cannot_be_used_is_refused(tmp_path: Path, rows: list[dict], message: str) -> None:
    folder, path = masked(tmp_path / "pets", 4), tmp_path / "weights.jsonl"
    if rows:
        write_table(path, rows)
    with pytest.raises(UserError, match=message):
        data_of(folder, loss_weight_table={"path": str(path)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_path": "masks", "mask_suffix": ".mask.png"}, "mask_path and mask_suffix both say where the masks are"),
        ({"mask_required": True}, "mask_required: nothing says where the masks are"),
        ({"conditioning_data": "m"}, "no entry of dataset_type conditioning has the id 'm'"),
        ({"conditioning_data": "other"}, "the entry 'other' has no conditioning_type"),
        ({"mask_path": "{folder}/masks"}, "would be training images too"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    folder = masked(tmp_path / "pets")
    given = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in keys.items()}
    other = {"id": "other", "dataset_type": "conditioning", "instance_data_dir": str(tmp_path / "masks")}
    with pytest.raises(ConfigError, match=message):
        data_of(folder, other, **given)


def test_values_that_are_the_defaults_ask_for_no_column() -> None:
    (spec,) = specs_of(Path("pets"), alpha_mask=False, mask_required="false", loss_weight=1)
    assert spec.columns == {}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"mask_suffix": ".png"}, "mask_suffix cannot be '.png'"),
        ({"alpha_mask": 3}, "alpha_mask cannot be 3"),
        ({"conditioning_type": "canny"}, "conditioning_type cannot be 'canny'"),
        ({"loss_weight": -1}, "loss_weight cannot be -1"),
    ],
)
def test_wrong_values_are_named(keys: dict[str, object], problem: str) -> None:
    entry = {"id": "pets", "instance_data_dir": "pets", **keys}
    _, problems = parse_datasets([entry], where="data.json", defaults=DataDefaults(), catalog=CATALOG)
    assert [str(each.message) for each in problems] == [problem]
