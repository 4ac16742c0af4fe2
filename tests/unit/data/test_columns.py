"""A column of a plugin: its keys in an entry, what it adds to the index, and what batches have of it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from PIL import Image

from smalti.data import (
    BUILT_IN_METADATA,
    BUILT_IN_STORAGES,
    BadSampleError,
    Catalog,
    Column,
    ColumnKeys,
    DataDefaults,
    Loader,
    PreparedData,
    build_datasets,
    parse_datasets,
    prepare,
)
from smalti.data.batch_check import BatchShape
from smalti.data.prepared import DataRules
from smalti.types import ColumnEntry, World


class LengthKeys(ColumnKeys):
    longest: int

    @property
    def endings(self):
        return (".length.png",)


class Length(Column):
    """The length of the name of an image, which must not be `longest`; 0 for those of other datasets."""

    fields = (pa.field("length", pa.int64()),)

    def __init__(self, spec, keys, catalog, specs):
        self._longest = keys.longest

    def listed(self, samples):
        lengths = [len(key) for key in samples.column("key").to_pylist()]
        problems = pa.array(["too long" if length > self._longest else "" for length in lengths])
        at = samples.schema.get_field_index("problem")
        samples = samples.set_column(at, samples.schema.field(at), problems)
        return samples.append_column(self.fields[0], pa.array(lengths))

    def check(self, fields):
        return [f"{sum(len(each['length']) for each in fields)} lengths"]

    def read(self, sample, framing):
        if sample.value("length") == 6:
            raise BadSampleError("six")
        return torch.tensor([sample.value("length"), len(sample.read()), *framing.scaled])

    def neutral(self, framing):
        return torch.zeros(4, dtype=torch.int64)


ENTRY = ColumnEntry(name="length", title="Length", keys=f"{__name__}:LengthKeys", factory=f"{__name__}:Length")
CATALOG = Catalog.of(BUILT_IN_STORAGES, BUILT_IN_METADATA, [ENTRY])


def parse(*entries: dict[str, object], catalog: Catalog = CATALOG):
    return parse_datasets(entries, where="", defaults=DataDefaults(resolution=16, caption_strategy="filename"), catalog=catalog)


def data_of(*entries: dict[str, object], run: Path | None = None) -> PreparedData:
    specs, problems = parse(*entries)
    assert not problems
    shape = BatchShape(train_batch_size=4, ranks=1, accumulation=1)
    return prepare(build_datasets(specs, CATALOG, run), DataRules(seed=3, shape=shape, alignment=8, error_budget=9))


@pytest.fixture
def pets(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "pets").mkdir()
    for name in ("a", "bc", "def", "ghijkl", "a.length"):
        Image.new("RGB", (32, 16)).save(tmp_path / "pets" / f"{name}.png")
    return {"id": "pets", "instance_data_dir": str(tmp_path / "pets")}


def test_batches_have_what_a_column_reads_and_neutral_values_of_other_datasets(pets, tmp_path: Path) -> None:
    (tmp_path / "cars").mkdir()
    for number in range(4):
        Image.new("RGB", (32, 16)).save(tmp_path / "cars" / f"{number}.png")
    data = data_of({**pets, "longest": 7}, {"id": "cars", "instance_data_dir": str(tmp_path / "cars")})
    errors = data.error_budget()
    with Loader(data, world=World(), micro_batch=4, errors=errors) as loader:
        micros = [batch.micro[0] for batch in islice(loader, 8)]
    found = {key: row.tolist() for one in micros for key, row in zip(one.keys, one.columns["length"], strict=True)}

    size = (tmp_path / "pets/a.png").stat().st_size
    assert found == {
        "pets/a.png": [5, size, 24, 12],
        "pets/def.png": [7, size, 24, 12],
        **{f"cars/{number}.png": [0, 0, 0, 0] for number in range(4)},
    }
    assert [(one.key, one.reason) for one in data.quarantined] == [("ghijkl.png", "too long")]
    assert [(one.key, one.reason) for one in errors.items] == [("bc.png", "six")]
    assert data.notices[0] == "4 lengths"


def test_without_columns_no_visit_is_framed(pets) -> None:
    def latent_shape(width, height):
        raise AssertionError("nobody reads a column")

    with Loader(data_of(pets), world=World(), micro_batch=4, latent_shape=latent_shape) as loader:
        assert next(loader).micro[0].columns == {}


def test_an_index_with_a_column_takes_over_rows_of_one_without_and_back(pets, tmp_path: Path) -> None:
    first = data_of(pets, run=tmp_path / "run")
    keys = set(data_of({**pets, "longest": 99}, run=tmp_path / "run").datasets[0].index.keys())
    back = data_of(pets, run=tmp_path / "run")

    assert keys == {"a.png", "bc.png", "def.png", "ghijkl.png"}
    assert set(back.datasets[0].index.keys()) == keys | {"a.length.png"}
    assert back.identity == first.identity


def test_keys_of_a_column_are_checked_and_without_its_package_named(pets) -> None:
    for value, message in (("many", "longest cannot be 'many'"), (1.5, "longest cannot be 1.5")):
        assert [problem.message for problem in parse({**pets, "longest": value})[1]] == [message]
    (problem,) = parse({**pets, "mask_path": "masks"})[1]
    assert problem.message == "mask_path belongs to smalti-objectives"
    assert "objectives" in problem.fix
