"""Scans and encodings on a real Ray cluster give what one process gives, also when a node is killed on the way."""

import json
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
import torch
from PIL import Image

import smalti_ray.data.encode
from smalti.data import LocalStorage
from smalti.rundir import RunDirectory
from smalti_cache.store import PackStore
from support.commands import commands
from support.raylets import Raylets
from support.whole import only_whole

GATED = Path(__file__).parents[3] / "tests" / "e2e" / "gated"
IMAGES = 40
MANY = 20_000


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def cluster(gate, tmp_path_factory):
    """Two nodes, each with room for one worker, whose workers have the family of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(GATED), os.environ.get("PYTHONPATH")))))
        patch.setenv("GATE", str(gate))
        patch.syspath_prepend(GATED)
        started = Raylets(tmp_path_factory.mktemp("cluster"))
        try:
            started.add()
            started.add()
            yield started
        finally:
            ray.shutdown()
            started.close()


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "pets"
    folder.mkdir()
    for number in range(IMAGES):
        draw(folder, number)
    entry = {"id": "pets", "instance_data_dir": str(folder), "resolution": 16, "resolution_type": "pixel"}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    return folder


@pytest.fixture
def call(tmp_path, capsys, cluster):
    """`smalti WORDS` for this data, on the cluster unless there is another address."""
    run = commands(capsys)
    words = [f"--data_backend_config={tmp_path}/data.json", "--model_family=gated", "--train_batch_size=2", "--use_cpu"]
    ray = ["--engine=ray", f"--address={cluster.address}"]
    return lambda *more, engine=True: run(*more[:2], *words, *(ray if engine else ()), *more[2:])


def draw(folder, number):
    pixels = np.full((24, 20 + 8 * (number % 2), 3), number, dtype=np.uint8)
    pixels[: number % 20] = 255
    Image.fromarray(pixels).save(folder / f"{number:03}.png")
    (folder / f"{number:03}.txt").write_text(f"image {number // 2}")


def entries(cache):
    """The entries of each store, by key; no key is there twice."""
    found = {}
    for folder in sorted(path for path in cache.iterdir() if (path / "encoder.json").exists()):
        store = PackStore(LocalStorage(folder), "")
        store.refresh()
        keys = [tuple(map(int, key)) for table in store.columns for key in zip(table["high"], table["low"], strict=True)]
        assert len(set(keys)) == len(keys)
        found[folder.name] = dict(zip(keys, store.get_many(keys), strict=True))
    return found


def same(one, other):
    return (
        one.keys() == other.keys()
        and all(one[name].keys() == other[name].keys() for name in one)
        and all(
            torch.equal(value, other[name][key][part])
            for name in one
            for key, entry in one[name].items()
            for part, value in entry.items()
        )
    )


def rows(index):
    with pa.memory_map(str(index)) as file:
        return pa.ipc.open_file(file).read_all().to_pylist()


@only_whole("plugins/ray/tests/test_data.py::test_a_cache_is_the_same_though_a_node_is_killed_on_the_way")
def test_a_scan_by_a_cluster_gives_the_index_of_one_process(call, data, tmp_path):
    (data / "broken.png").write_bytes(b"no image")
    indexes = []
    for engine in (False, True):
        code, out, errors = call("dataset", "scan", f"--output_dir={tmp_path}/{engine}", "--json", engine=engine)
        assert code == 0, errors
        [found] = json.loads(out)["datasets"]
        assert (found["images"], found["usable"]) == (IMAGES + 1, IMAGES)
        indexes.append(rows(tmp_path / str(engine) / "data" / "pets.arrow"))
    assert indexes[0] == indexes[1]


def test_a_cache_is_the_same_though_a_node_is_killed_on_the_way(call, data, tmp_path, cluster, gate, monkeypatch):
    monkeypatch.setattr(smalti_ray.data.encode, "IMAGES", 8)
    plain, cache = tmp_path / "plain", tmp_path / "cache"
    assert call("cache", "encode", f"--cache_dir={plain}", engine=False)[0] == 0

    def kill():
        reached = gate.with_suffix(".reached")
        while not reached.exists():
            time.sleep(0.05)
        cluster.lose(cluster.node_of(psutil.Process(int(reached.read_text()))))
        gate.unlink()

    gate.write_text("encoding")  # a worker waits in its second range
    killing = threading.Thread(target=kill)
    killing.start()
    code, out, errors = call("cache", "encode", f"--cache_dir={cache}", "--json")
    killing.join()
    assert code == 0, errors
    assert "is lost; part " in errors
    done = json.loads(out)
    assert done["images"] == IMAGES
    assert same(entries(plain), entries(cache))
    assert not list(cache.glob(".*"))

    draw(data, IMAGES)
    code, out, errors = call("cache", "encode", f"--cache_dir={cache}", "--json")
    assert code == 0, errors
    done = json.loads(out)
    assert (done["images"], done["images_encoded"], done["texts_encoded"]) == (IMAGES + 1, 1, 1)


@only_whole("plugins/ray/tests/test_data.py::test_a_cache_is_the_same_though_a_node_is_killed_on_the_way")
@pytest.mark.timeout(900)
def test_a_large_cache_trains_though_a_node_is_killed_while_it_is_made(capsys, tmp_path, cluster):
    """Of several packs and ranges; the node is lost once a pack is there."""
    folder, plain, cache = tmp_path / "small", tmp_path / "plain", tmp_path / "cache"
    folder.mkdir()
    for number in range(MANY):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05}.png", compress_level=1)
        (folder / f"{number:05}.txt").write_text(f"image {number // 2}")
    entry = {"id": "small", "instance_data_dir": str(folder), "resolution": 8, "resolution_type": "pixel"}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    words = [f"--data_backend_config={tmp_path}/data.json", "--model_family=gated", "--train_batch_size=16", "--use_cpu"]
    run = commands(capsys)
    assert run("cache", "encode", *words, f"--cache_dir={plain}")[0] == 0

    cluster.add()

    def kill():
        while not list(cache.glob("latents*/*.safetensors")):
            time.sleep(0.05)
        cluster.lose(cluster.worker("do")[0])

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    flags = ("--engine=ray", f"--address={cluster.address}", "--engine_workers=2")
    code, out, errors = run("cache", "encode", *words, *flags, f"--cache_dir={cache}", "--json")
    assert (code, "is lost; part " in errors) == (0, True), errors
    assert json.loads(out)["images"] == MANY
    made = entries(cache)
    assert same(entries(plain), made)

    before = sorted(cache.rglob("*"))
    code, _, errors = run("train", *words, f"--cache_dir={cache}", f"--output_dir={tmp_path}/run", "--max_train_steps=3")
    assert code == 0, errors
    assert (RunDirectory(tmp_path / "run").checkpoints / "step-00000003").exists()
    assert sorted(cache.rglob("*")) == before, "what is in the cache is not encoded again"


def test_what_the_cluster_lacks_is_named(call, tmp_path, data):
    """A killed node counts until the cluster has missed it."""
    code, _, errors = call("cache", "encode", f"--cache_dir={tmp_path}/cache", "--engine_cpus=64", "--engine_wait=1")
    assert (code, "64 CPU" in errors, "--engine_cpus" in errors) == (2, True, True), errors
    assert re.search(r"the cluster has [12] CPU \(", errors), errors
