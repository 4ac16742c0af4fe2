"""What is wrong with a cluster or with what its nodes see is named, before anything is written."""

import socket
from pathlib import Path

import pytest

from smalti.config import resolve
from smalti.errors import UserError
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_ray.cluster import check_versions, versions
from smalti_ray.data.pool import check_encoders
from smalti_ray.data.worker import Failure, Job, Opened, Worker
from support.commands import commands


@pytest.fixture
def pets(tmp_path):
    (tmp_path / "pets").mkdir()
    return tmp_path / "pets"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("closed", "there is no Ray cluster at"),
        ("ray://head:10001", "that of a client"),
        ("head", "is not that of a Ray cluster"),
    ],
)
def test_an_address_without_a_cluster_is_refused(tmp_path, pets, capsys, monkeypatch, address, message):
    monkeypatch.setenv("SMALTI_PLUGINS", "ray,data,cache")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if address == "closed":
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = (f"--instance_data_dir={pets}", f"--output_dir={tmp_path}/run", "--engine=ray", f"--address={address}")
        code, _, errors = commands(capsys)("dataset", "scan", *words)
    assert (code, message in errors) == (2, True), errors
    assert not (tmp_path / "run").exists()


def test_a_scan_needs_a_folder_that_all_nodes_see(pets, capsys, monkeypatch):
    monkeypatch.setenv("SMALTI_PLUGINS", "ray,data,cache")
    code, _, errors = commands(capsys)("dataset", "scan", f"--instance_data_dir={pets}", "--engine=ray")
    assert (code, "--output_dir" in errors) == (2, True)


def test_a_node_with_other_versions_is_refused():
    check_versions("node 10.0.0.7", versions())
    with pytest.raises(UserError, match=r"node 10\.0\.0\.7 has torch 1\.0, not"):
        check_versions("node 10.0.0.7", {**versions(), "torch": "1.0"})


@pytest.fixture
def job(tmp_path):
    plugins = load_plugins(Selection(only=("ray", "data", "cache")))
    config = resolve(schema_of(plugins), [f"--output_dir={tmp_path}/run"], environment={})
    probe = tmp_path / "probe"
    probe.touch()
    return {
        "kind": "scan",
        "values": {**config.values(), "plugins": ["ray", "data", "cache"]},
        "accelerate": {},
        "plugins": tuple(plugins.versions),
        "current": str(Path.cwd()),
        "folder": str(tmp_path),
        "probes": (str(probe),),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"probes": ("/nowhere/probe",)}, "/nowhere is not the folder"),
        ({"current": "/nowhere"}, "/nowhere is not the folder"),
        ({"plugins": ("smalti 9.9",)}, "other plugins"),
    ],
)
def test_a_worker_names_what_its_node_lacks(job, changed, message):
    assert isinstance(Worker().open(Job(**job)), Opened)
    answer = Worker().open(Job(**{**job, **changed}))
    assert isinstance(answer, Failure)
    error = answer.raised("10.0.0.7")
    assert (message in error.message, "10.0.0.7" in error.message, bool(error.fix), error.exit_code) == (True, True, True, 2)


def test_a_node_with_another_model_is_refused():
    check_encoders("10.0.0.7", {"latents": "1"}, {"latents": "1"})
    with pytest.raises(UserError, match=r"node 10\.0\.0\.7 encodes latents with other weights"):
        check_encoders("10.0.0.7", {"latents": "2"}, {"latents": "1"})
