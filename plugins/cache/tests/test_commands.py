"""Caches of latents and captions on the command line: listed, verified, and removed with nothing else."""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
import torch

import smalti_cache.directory
from smalti.data.storage.local import LocalStorage
from smalti_cache.contents import cached_encodings_in, digest_of
from smalti_cache.directory import default_folder
from smalti_cache.earlier import EarlierParts
from smalti_cache.pack import PackBuilder
from smalti_cache.store import PackStore
from support.cache_parts import earlier_part
from support.commands import commands


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch):
    monkeypatch.setenv("SMALTI_PLUGINS", "cache")


@pytest.fixture
def run(capsys):
    return commands(capsys, "cache")


def store_in(root, kind, family, *packs):
    """A cache with one entry per number, in a pack per list of numbers."""
    identity = {"kind": kind, "family": family, "dtype": "float32"}
    folder = root / f"{kind}-{family}-{digest_of(json.dumps(identity, sort_keys=True))}"
    folder.mkdir(parents=True)
    (folder / "encoder.json").write_text(json.dumps(identity, indent=2))
    store = PackStore(LocalStorage(folder), "")
    for numbers in packs:
        pack = PackBuilder()
        for number in numbers:
            pack.add((1, number), {"rows": torch.full((50,), float(number))})
        store.put(pack)
    return folder


@pytest.fixture
def caches(tmp_path):
    root = tmp_path / "cache"
    return {
        "latents": store_in(root, "latents", "toy", [1, 2, 3], [4]),
        "texts": store_in(root, "texts", "toy-large", [1, 2]),
    }


def damage(folder):
    """Change the last byte of each pack."""
    for pack in folder.glob("*.safetensors"):
        data = bytearray(pack.read_bytes())
        data[-1] ^= 4
        pack.write_bytes(data)


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_each_encoder_is_listed_with_its_entries_and_bytes(caches, tmp_path, run):
    code, out, _ = run("ls", f"--cache_dir={tmp_path}/cache", "--json")
    listed = json.loads(out)["encodings"]
    assert code == 0
    assert [(each["kind"], each["family"], each["entries"], each["packs"], each["damaged"]) for each in listed] == [
        ("latents", "toy", 4, 2, 0),
        ("texts", "toy-large", 2, 1, 0),
    ]
    assert [each["place"] for each in listed] == [str(folder) for folder in caches.values()]
    assert [each["bytes"] for each in listed] == [
        sum(path.stat().st_size for path in folder.iterdir()) for folder in caches.values()
    ]
    assert "toy-large" in run("ls", f"--output_dir={tmp_path}")[1]


def test_the_configuration_of_a_run_says_where_its_caches_are(caches, tmp_path, run):
    (tmp_path / "images").mkdir()
    entry = {"id": "pets", "instance_data_dir": str(tmp_path / "images"), "cache_dir_vae": str(tmp_path / "cache")}
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    arguments = (f"--data_backend_config={tmp_path}/data.json", f"--output_dir={tmp_path}/run", "--json")
    assert len(json.loads(run("ls", *arguments)[1])["encodings"]) == 2
    assert not (tmp_path / "run").exists()


def test_listing_imports_no_torch(caches, tmp_path):
    code = "import sys\nfrom smalti.cli.entry import main\n"
    code += "try:\n    main(sys.argv[1:])\nfinally:\n    assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "cache", "ls", f"--cache_dir={tmp_path}/cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "toy-large" in done.stdout, done.stderr) == (0, True, "")


def test_damaged_entries_are_named_until_they_are_encoded_again(caches, tmp_path, run):
    where = f"--cache_dir={tmp_path}/cache"
    assert run("verify", where)[0] == 0
    damage(caches["latents"])
    code, out, _ = run("verify", where, "--json")
    latents, texts = json.loads(out)["encodings"]
    assert (code, latents["missing"], len(latents["problems"]), texts["missing"]) == (3, 2, 2, 0)
    assert all("is damaged at byte" in problem for problem in latents["problems"])
    assert run("verify", where)[0] == 3  # noted, and not checked again
    assert [each["damaged"] for each in json.loads(run("ls", where, "--json")[1])["encodings"]] == [2, 0]

    again = PackBuilder()
    for number in (3, 4):
        again.add((1, number), {"rows": torch.zeros(50)})
    PackStore(LocalStorage(caches["latents"]), "").put(again)
    assert run("verify", where)[0] == 0


def test_a_pack_that_cannot_be_read_is_named(caches, tmp_path, run):
    [pack] = caches["texts"].glob("*.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1])
    code, out, _ = run("verify", f"--cache_dir={tmp_path}/cache", "--encoder=texts")
    assert (code, str(pack) in out) == (3, True)
    assert json.loads(run("ls", f"--cache_dir={tmp_path}/cache", "--json")[1])["encodings"][1]["unreadable"] == [pack.name]


def test_only_old_caches_are_pruned_and_a_dry_run_removes_nothing(caches, tmp_path, run):
    old = time.time() - 40 * 86400
    for path in caches["texts"].iterdir():
        os.utime(path, (old, old))
    [some, *_] = caches["latents"].glob("*.safetensors")
    os.utime(some, (old, old))  # a cache is as old as its newest pack
    command = ("prune", f"--cache_dir={tmp_path}/cache", "--older_than=30d")
    would = json.loads(run(*command, "--dry_run", "--json")[1])
    assert [each["place"] for each in would["would_remove"]] == [str(caches["texts"])]
    assert caches["texts"].is_dir()
    code, _, errors = run(*command)
    assert (code, "--yes" in errors, str(caches["texts"]) in errors) == (2, True, True)
    assert caches["texts"].is_dir()
    assert run(*command, "--yes")[0] == 0
    assert (caches["texts"].exists(), caches["latents"].exists()) == (False, True)
    assert run(*command, "--yes")[1] == "nothing to remove\n"


def test_a_cache_that_runs_still_read_is_not_pruned_as_unused(caches, tmp_path, run):
    old = time.time() - 40 * 86400
    for folder in caches.values():
        PackStore(LocalStorage(folder), "").mark_used()
        for path in folder.iterdir():
            os.utime(path, (old, old))
    (caches["texts"] / "used.json").write_text(json.dumps({"used": old}))
    rows = run("ls", f"--cache_dir={tmp_path}/cache")[1].splitlines()
    assert ["0 min" in row for row in rows if "toy" in row] == [True, False]
    command = ("prune", f"--cache_dir={tmp_path}/cache", "--yes")
    assert run(*command, "--unused=50d")[1] == "nothing to remove\n"
    assert run(*command, "--unused=30d")[0] == 0
    assert (caches["texts"].exists(), caches["latents"].exists()) == (False, True)
    assert run(*command, "--encoder=toy")[0] == 0
    assert not caches["latents"].exists()


def test_the_index_of_a_removed_cache_on_this_node_is_removed(caches, tmp_path, run, monkeypatch):
    monkeypatch.setattr(smalti_cache.directory, "IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    indexes = default_folder()
    for folder in caches.values():
        for _ in range(2):
            pack = PackBuilder()
            pack.add((2, len(list(folder.iterdir()))), {"rows": torch.zeros(1)})
            store = PackStore(LocalStorage(folder), "", folder=indexes)
            store.refresh()
            store.put(pack)
            store.refresh()
    assert len(list(indexes.iterdir())) == 2
    assert run("prune", f"--cache_dir={tmp_path}/cache", "--encoder=texts", "--yes")[0] == 0
    assert len(list(indexes.iterdir())) == 1


@pytest.mark.parametrize("name", ["latents", "toy", "latents-toy-*"])
def test_caches_are_pruned_by_name_and_files_of_others_are_left(caches, tmp_path, run, name):
    others = {"notes.txt", "model.bin", ".hidden.safetensors"}
    for other in others:
        (caches["latents"] / other).write_text("mine")
    damage(caches["latents"])
    run("verify", f"--cache_dir={tmp_path}/cache")
    assert run("prune", f"--cache_dir={tmp_path}/cache", f"--encoder={name}", "--yes")[0] == 0
    assert files(caches["latents"]) == others
    assert caches["texts"].is_dir()


@pytest.mark.parametrize("text", [None, "{", '{"kind": "latents"}', "[]"])
def test_a_folder_that_is_not_the_cache_of_its_encoder_is_left(caches, tmp_path, run, text):
    description = caches["latents"] / "encoder.json"
    description.unlink()
    if text is not None:
        description.write_text(text)
    before = files(caches["latents"])
    code, _, errors = run("clear", "encodings", f"--cache_dir={tmp_path}/cache", "--yes")
    assert (code, "encoder.json" in errors) == (2, True)
    assert (files(caches["latents"]), caches["texts"].is_dir()) == (before, True)


def test_clear_removes_one_cache_or_all(caches, tmp_path, run):
    where = f"--cache_dir={tmp_path}/cache"
    assert run("clear", caches["texts"].name, where, "--yes")[0] == 0
    assert [path.exists() for path in caches.values()] == [True, False]
    assert run("clear", "encodings", where, "--yes")[0] == 0
    assert (tmp_path / "cache").is_dir()
    assert list((tmp_path / "cache").iterdir()) == []


def test_nothing_is_removed_without_saying_what(caches, tmp_path, run):
    where = f"--cache_dir={tmp_path}/cache"
    assert "nothing says which caches to remove" in run("prune", where, "--yes")[2]
    assert "no cache matches 'flux'" in run("prune", where, "--encoder=flux", "--yes")[2]
    assert "is not an age" in run("prune", where, "--older_than=month")[2]
    assert all(path.is_dir() for path in caches.values())


def test_packs_that_refer_to_files_of_earlier_versions_are_removed_before_them(tmp_path, monkeypatch):
    folder = store_in(tmp_path, "texts", "toy")
    earlier_part(folder / "00-part.safetensors", {"aa": {"rows": torch.ones(4)}})
    store = PackStore(LocalStorage(folder), "")
    store.refresh()
    store.put_references(EarlierParts(store.earlier_parts, store.read).references([((1, 1), "aa")]))
    [cache] = cached_encodings_in(tmp_path)
    assert (cache.contents().entries, cache.verify().missing, cache.verify().problems) == (1, 0, ())
    removed = []
    delete = LocalStorage.delete
    monkeypatch.setattr(LocalStorage, "delete", lambda self, key: (removed.append(key), delete(self, key)))
    cache.remove()
    assert removed[1:] == ["00-part.safetensors", "encoder.json"]
    assert not folder.exists()
