"""A sharded run of a tiny SDXL whose data, caches and checkpoints are in a bucket; 5 % of the requests to it fail."""

import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from click.testing import CliRunner
from PIL import Image

from smalti_data.dataset import dataset
from smalti_testing import FaultProxy, Rule, seaweed

EXAMPLE = Path(__file__).parents[2] / "examples" / "sdxl-fsdp2.toml"
KINDS = ("500", "503", "reset_before", "lost_reply", "cut", "cut_reset", "short_length", "429")
SMALL = {
    "use_cpu": True,
    "mixed_precision": "no",
    "resolution": 64,
    "learning_rate": 1e-3,
    "train_batch_size": 2,
    "checkpoint_step_interval": 2,
    "probe": False,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    lines = EXAMPLE.read_text().splitlines()
    config = tmp_path_factory.mktemp("config") / "sdxl.toml"
    config.write_text("\n".join(line for line in lines if not line.startswith("instance_data_dir")))
    return SMALL | {"config": config, "pretrained_model_name_or_path": tiny.sdxl(tmp_path_factory.mktemp("sdxl"))}


@pytest.fixture(scope="module")
def local(tmp_path_factory, pictures, train, small):
    """The same images under the same name, in a folder with text files, without a pause."""
    folder = tmp_path_factory.mktemp("local")
    file = entries(folder, [{"id": "photos", "instance_data_dir": str(pictures)}])
    return train(folder / "run", instance_data_dir=None, data_backend_config=file, max_train_steps=4, **small)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory, pictures):
    """In front of a server that has the images, and a table of their captions and sizes."""
    rules = [Rule(fault=fault, chance=0.05 / len(KINDS), retry_after=0) for fault in KINDS]
    with seaweed(tmp_path_factory.mktemp("store")) as store:
        for path in pictures.glob("*.png"):
            assert store.request("PUT", f"photos/{path.name}", path.read_bytes()).status == 200
        assert store.request("PUT", "photos/metadata.parquet", table(pictures)).status == 200
        with FaultProxy(store.endpoint, rules, seed=11) as proxy:
            proxy.store = store
            yield proxy


@pytest.fixture(scope="module")
def remote(tmp_path_factory, proxy, train, small):
    """Two steps on one machine, and the rest on another that has nothing but the model and the addresses."""
    store, runs = proxy.store, []
    keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key, "AWS_REGION": store.region}
    for steps in (2, 4):
        machine = tmp_path_factory.mktemp("machine")
        folders = {name: machine / name.lower() for name in ("HF_HOME", "XDG_CACHE_HOME", "TMPDIR")}
        for folder in folders.values():
            folder.mkdir()
        bucket = {"type": "aws", "aws_bucket_name": store.bucket, "aws_endpoint_url": proxy.endpoint}
        data = [
            {
                "id": "photos",
                "aws_data_prefix": "photos",
                "metadata_backend": "parquet",
                "parquet": {"filename_column": "name", "caption_column": "text"},
                "image_embeds": "latents",
                **bucket,
            },
            {"id": "latents", "dataset_type": "image_embeds", "aws_data_prefix": "cache/latents", **bucket},
            {"id": "texts", "dataset_type": "text_embeds", "default": True, "aws_data_prefix": "cache/texts", **bucket},
        ]
        run = train(
            machine / "run",
            instance_data_dir=None,
            data_backend_config=entries(machine, data),
            checkpoint_mirror=f"s3://{store.bucket}/runs/first",
            checkpoint_mirror_endpoint_url=proxy.endpoint,
            max_train_steps=steps,
            variables=keys | {name: str(folder) for name, folder in folders.items()},
            **small,
        )
        assert run.code == 0, run.output
        runs.append(run)
    return runs


def table(pictures):
    """The captions and sizes as a parquet file, in another order than that of the names."""
    rows = []
    for path in sorted(pictures.glob("*.png"), reverse=True):
        with Image.open(path) as image:
            size = {"width": image.width, "height": image.height}
        rows.append({"name": path.name, "text": path.with_suffix(".txt").read_text(), **size})
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def entries(folder, found):
    file = folder / "data.json"
    file.write_text(json.dumps(found))
    return file


def losses(run):
    return {event["step"]: event["loss"] for event in run.events("step")}


def test_losses_are_those_of_a_folder_and_of_one_machine(local, remote):
    assert local.code == 0, local.output
    assert losses(remote[0]) | losses(remote[1]) == pytest.approx(losses(local), rel=1e-6)
    assert sorted(losses(remote[1]))[-2:] == [3, 4]


def test_the_order_of_images_and_captions_is_that_of_the_folder(local, remote, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", proxy.store.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", proxy.store.secret_key)
    orders = []
    for run in (local, remote[1]):
        found = CliRunner().invoke(dataset, ["order", str(run.directory / "config.toml"), "--batches=9", "--json"])
        assert found.exit_code == 0, found.output
        orders.append(found.stdout)
    assert orders[0] == orders[1]
    assert "circle number 7" in orders[0]


def test_another_machine_resumes_from_the_bucket(remote):
    assert "resuming from" in remote[1].output
    assert "step-00000002" in remote[1].output


def test_another_machine_takes_latents_and_texts_from_the_bucket(proxy, remote):
    first, second = (re.findall(r"encoding (\d+) of (\d+) (\w+)", run.output) for run in remote)
    assert first == [("25", "25", "texts"), ("24", "24", "latents")]
    assert second == []
    for what in ("latents", "texts"):
        assert any(key.endswith(".safetensors") for key in proxy.store.keys(f"cache/{what}/"))
    assert not any((run.directory / "cache").exists() for run in remote)


def test_the_network_did_fail_and_nothing_secret_was_printed(proxy, remote):
    assert len(proxy.injected) >= 5
    assert not any(proxy.store.secret_key in run.output for run in remote)
    for run in remote:
        texts = [
            path.read_text(errors="replace") for path in run.directory.rglob("*") if path.suffix in (".toml", ".json", ".jsonl")
        ]
        assert not any(proxy.store.secret_key in text for text in texts)
