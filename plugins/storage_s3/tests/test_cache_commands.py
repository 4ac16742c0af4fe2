"""`smalti cache` on caches of latents and captions in a bucket."""

import json

import pytest
import torch

from smalti.config import resolve
from smalti.data import StorageError, catalog_of
from smalti.data.storage.protocol import Storage
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_cache.contents import digest_of
from smalti_cache.encode_ahead import open_encoder
from smalti_cache.pack import PackBuilder
from smalti_cache.store import PackStore
from smalti_testing import TinyFamily
from support.commands import commands

OTHERS = {"caches/latents-notes/a.txt", "caches/other/x.safetensors", "caches/texts-notes.txt"}


def store_on(storage: Storage, kind: str, family: str) -> str:
    identity = {"kind": kind, "family": family}
    prefix = f"caches/{kind}-{family}-{digest_of(json.dumps(identity, sort_keys=True))}"
    storage.write(f"{prefix}/encoder.json", json.dumps(identity).encode())
    for number in range(2):
        pack = PackBuilder()
        pack.add((1, number), {"rows": torch.full((50,), float(number))})
        PackStore(storage, prefix).put(pack)
    return prefix


@pytest.fixture
def run(capsys):
    return commands(capsys, "cache")


def test_caches_in_a_bucket_are_listed_verified_and_removed_with_nothing_else(store, opened, options, tmp_path, run):
    keys = options(store)
    storage = opened(store, aws_data_prefix=keys["aws_data_prefix"])
    texts, larger, latents = (store_on(storage, *each) for each in (("texts", "toy"), ("texts", "toy-2"), ("latents", "toy")))
    for other in OTHERS:
        storage.write(other, b"mine")
    (tmp_path / "images").mkdir()
    entries = [
        {"id": "pets", "instance_data_dir": str(tmp_path / "images")},
        {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "aws", "cache_dir": "caches", **keys},
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    where = (f"--data_backend_config={tmp_path}/data.json", f"--output_dir={tmp_path}/run")

    found = json.loads(run("ls", *where, "--json")[1])["encodings"]
    assert {each["place"].rpartition("caches/")[2]: (each["entries"], each["written"]) for each in found} == {
        prefix.removeprefix("caches/"): (2, None) for prefix in (texts, larger, latents)
    }
    assert run("verify", *where)[0] == 0
    damaged = next(file.key for file in storage.list(f"{texts}/") if file.key.endswith(".safetensors"))
    storage.write(damaged, storage.read(damaged)[:-1] + b"\1")
    code, out, _ = run("verify", *where)
    assert (code, damaged in out) == (3, True)
    assert "is not known: its storage does not tell times" in run("prune", *where, "--older_than=1d", "--yes")[2]
    for prefix in (texts, larger, latents):
        PackStore(storage, prefix).mark_used()
    assert run("prune", *where, "--unused=1d", "--yes")[1] == "nothing to remove\n"
    assert run("prune", *where, "--encoder=toy", "--yes")[0] == 0
    assert {file.key.rpartition("/")[0] for file in storage.list("caches/") if file.key not in OTHERS} == {larger}
    assert {file.key for file in storage.list("caches/")} >= OTHERS


def test_a_bucket_is_the_same_under_another_address(store, opened):
    here, there = (
        opened(store, aws_data_prefix="one"),
        opened(store, aws_data_prefix="one", aws_endpoint_url=store.endpoint.replace("127.0.0.1", "localhost")),
    )
    assert here.location != there.location
    assert here.identity == there.identity != opened(store, aws_data_prefix="two").identity


def test_a_missing_bucket_of_a_cache_is_found_by_the_launcher(store, options, tmp_path):
    keys = options(store) | {"aws_bucket_name": "nowhere"}
    (tmp_path / "images").mkdir()
    entries = [
        {"id": "pets", "instance_data_dir": str(tmp_path / "images"), "image_embeds": "latents"},
        {"id": "latents", "dataset_type": "image_embeds", "type": "aws", **keys},
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    plugins = load_plugins(Selection(only=("cache", "storage_s3")))
    arguments = [f"--data_backend_config={tmp_path}/data.json", f"--output_dir={tmp_path}/run"]
    config = resolve(schema_of(plugins), arguments, environment={})

    def check(config):
        open_encoder(config, TinyFamily(), catalog_of(plugins)).check()

    with pytest.raises(StorageError, match="nowhere") as raised:
        check(config)
    assert "bucket" in f"{raised.value}{raised.value.fix}"
    check(resolve(schema_of(plugins), [*arguments, "--vae_cache_disable"], environment={}))
