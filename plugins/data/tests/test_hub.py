"""Datasets of the Hub: downloaded once, read without a connection, folders of the datasets library; the right files of them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from smalti.data import DataDefaults, DatasetSpec, catalog_of, parse_datasets
from smalti.errors import ConfigError, UserError
from smalti.plugins import load_plugins
from smalti_data.archives.hub import HubDataset
from smalti_testing import check_metadata_backend
from support.hub_server import TOKEN, HubServer, hub_server

CATALOG = catalog_of(load_plugins())


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    from huggingface_hub import constants

    server.repositories.clear()
    server.requests.clear()
    server.recover()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return server


def image(edge: int) -> dict[str, object]:
    data = io.BytesIO()
    Image.new("RGB", (edge, edge), (edge, 0, 0)).save(data, "PNG")
    return {"bytes": data.getvalue(), "path": f"{edge}.png"}


def rows(*edges: int) -> pa.Table:
    return pa.table({"image": [image(edge) for edge in edges], "text": [f"edge {edge}" for edge in edges]})


def parquet(*edges: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows(*edges), sink)
    return sink.getvalue()


def spec_of(**entry: object) -> DatasetSpec:
    specs, problems = parse_datasets(
        [{"id": "hub", "type": "huggingface", **entry}], where="data.json", defaults=DataDefaults(), catalog=CATALOG
    )
    assert problems == ()
    return specs[0]


def found(**entry: object) -> dict[str, tuple[str, ...] | None]:
    spec, catalog = spec_of(**entry), CATALOG
    storage = catalog.open_storage(spec)
    return {one.key: one.captions for one in catalog.open_source(spec, storage).list()}


def test_a_split_is_downloaded_once_and_read_without_a_connection(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"data/train-00000-of-00001.parquet": parquet(8, 9), "data/test-00000-of-00001.parquet": parquet(7)}
    hub.add_dataset("ann/cats", {**files, "README.md": b"# cats"})
    expected = {
        "data/train-00000-of-00001.parquet/000000000.png": ("edge 8",),
        "data/train-00000-of-00001.parquet/000000001.png": ("edge 9",),
    }
    block = {"dataset_name": "ann/cats", "file_extension": "jpg"}
    entry = {"metadata_backend": "huggingface", "caption_strategy": "huggingface", "huggingface": block}
    assert found(**entry) == expected
    spec = spec_of(**entry)
    check_metadata_backend(lambda: CATALOG.open_source(spec, CATALOG.open_storage(spec)))
    assert hub.sent("GET", "train-00000") == 1
    assert hub.sent("GET", "test-00000") == 0
    assert found(dataset_name="ann/cats") == expected
    assert hub.sent("GET", "train-00000") == 1
    assert set(found(dataset_name="ann/cats", split="test").values()) == {("edge 7",)}
    assert found(dataset_name="ann/cats", caption_strategy="instanceprompt", instance_prompt="x").keys() == expected.keys()
    hub.requests.clear()
    monkeypatch.setenv("RANK", "1")
    assert found(dataset_name="ann/cats") == expected
    assert hub.requests == []


def test_the_parquet_files_of_the_hub_are_used_where_a_dataset_has_none(hub: HubServer) -> None:
    hub.add_dataset("ann/zip", {"images.zip": b"zip"})
    hub.add_dataset(
        "ann/zip", {"default/train/0000.parquet": parquet(5), "default/test/0000.parquet": parquet(6)}, "refs/convert/parquet"
    )
    assert found(dataset_name="ann/zip") == {"default/train/0000.parquet/000000000.png": ("edge 5",)}
    hub.add_dataset("ann/none", {"images.zip": b"zip"})
    with pytest.raises(UserError, match="cannot be downloaded"):
        found(dataset_name="ann/none")


def test_an_interrupted_download_and_errors_of_the_hub(hub: HubServer) -> None:
    hub.add_dataset("ann/two", {f"train-{part}.parquet": parquet(part + 3) for part in range(2)})
    hub.fail("GET", "train-1.parquet", 403)
    with pytest.raises(UserError, match="ann/two cannot be downloaded") as error:
        found(dataset_name="ann/two")
    assert "hf auth login" in error.value.fix
    hub.recover()
    assert sorted(found(dataset_name="ann/two").values()) == [("edge 3",), ("edge 4",)]
    assert hub.sent("GET", "resolve/.*train-0.parquet") == 1
    with pytest.raises(UserError, match="neither a folder nor a name"):
        found(dataset_name="not a name!")
    with pytest.raises(UserError, match="is not a folder"):
        found(dataset_name="./missing")


def test_folders_of_the_datasets_library_are_read(tmp_path: Path) -> None:
    for split, edges in (("train", (4, 5)), ("test", (6,))):
        (tmp_path / "saved" / split).mkdir(parents=True)
        path = tmp_path / "saved" / split / "data-00000-of-00001.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows(*edges).schema) as writer:
            writer.write_table(rows(*edges), max_chunksize=1)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
        (tmp_path / "saved" / split / "cache-0123.arrow").write_bytes(b"of a map")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    name = str(tmp_path / "saved")
    assert sorted(found(dataset_name=name).values()) == [("edge 4",), ("edge 5",)]
    assert sorted(found(dataset_name=name, split="test").values()) == [("edge 6",)]
    spec, catalog = spec_of(dataset_name=name, caption_column={"text": 1}), CATALOG
    assert spec.caption_weights == (1,)
    source = catalog.open_source(spec, catalog.open_storage(spec))
    second = list(source.list())[1]
    assert source.read(second.place) == image(5)["bytes"]


@pytest.mark.parametrize(
    ("keys", "entry", "chosen"),
    [
        (["train.parquet", "test.parquet"], {}, ["train.parquet"]),
        (["a.parquet", "sub/b.parquet"], {}, ["a.parquet", "sub/b.parquet"]),
        (["partial-train/0.parquet", "x.csv"], {}, ["partial-train/0.parquet"]),
        (["default/train/0000.parquet", "other/train/0000.parquet"], {}, ["default/train/0000.parquet"]),
        (["b/train/0000.parquet", "a/train/0000.parquet"], {"dataset_config": "a"}, ["a/train/0000.parquet"]),
        (["b/train/0000.parquet", "a/train/0000.parquet"], {}, "has several configurations"),
        (["test.parquet", "val.parquet"], {}, "no files of the split 'train'"),
        (["a.parquet"], {"split": "dev"}, "no files of the split 'dev'"),
        (["a.csv"], {}, "no parquet files"),
    ],
)
def test_the_files_of_a_split(keys: list[str], entry: dict[str, str], chosen: list[str] | str) -> None:
    dataset = HubDataset(dataset_name="ann/cats", **entry)
    if isinstance(chosen, list):
        assert dataset.files(keys) == chosen
    else:
        with pytest.raises(UserError, match=chosen) as error:
            dataset.files(keys)
        assert error.value.fix


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "dataset_name is missing"),
        ({"dataset_name": "a/b", "split": "train[:10]"}, "parts of splits are not read"),
        ({"dataset_name": "a/b", "huggingface": {"filter_func": {"x": 1}}}, "unknown key 'filter_func'"),
    ],
)
def test_entries_that_cannot_be_read(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        CATALOG.open_storage(spec_of(**entry))
