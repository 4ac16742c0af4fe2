"""A real cluster on whose nodes not all is what the command has: every command ends with 2 and names the difference."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from support.images import images_in
from support.ray_launches import words
from support.raylets import Raylets, environment
from support.whole import only_whole

OTHER = "0.1.9"
GATED = Path(__file__).parents[3] / "tests" / "e2e" / "gated"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes. The one with two cores has another version of smalti."""
    folder = tmp_path_factory.mktemp("cluster")
    found = Raylets(folder)
    try:
        found.add()
        found.add(2, PYTHONPATH=str(with_other_version(folder / "packages")))
        yield found
    finally:
        found.close()


def with_other_version(folder: Path) -> Path:
    """A folder in which smalti is installed with another version, whose code is the same."""
    [metadata] = [Path(str(each.locate())) for each in distribution("smalti").files or () if each.name == "METADATA"]
    shutil.copytree(metadata.parent, folder / f"smalti-{OTHER}.dist-info")
    text = metadata.read_text().replace(f"\nVersion: {version('smalti')}\n", f"\nVersion: {OTHER}\n")
    (folder / f"smalti-{OTHER}.dist-info" / "METADATA").write_text(text)
    return folder


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """The Python of an environment with all that is installed here, and another patch release."""
    candidates = [Path(each, f"python3.{sys.version_info.minor}") for each in ("/usr/bin", "/usr/local/bin", "/opt/python/bin")]
    for each in filter(Path.exists, candidates):
        said = subprocess.run([each, "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
        if said != platform.python_version():
            folder = tmp_path_factory.mktemp("python")
            subprocess.run([each, "-m", "venv", "--without-pip", folder], check=True)
            [site] = folder.glob("lib/*/site-packages")
            (site / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
            return folder / "bin" / "python", said
    pytest.skip("there is no other patch release of this Python")


def called(python: Path | str, *command: str) -> tuple[int, str]:
    variables = {**environment(), "PYTHONPATH": str(GATED)}
    found = subprocess.run([python, "-m", "smalti", *command], capture_output=True, text=True, env=variables)
    return found.returncode, found.stderr


@only_whole("plugins/ray/tests/test_data_input.py::test_a_node_with_other_versions_is_refused")
def test_a_launch_names_the_worker_with_another_version(cluster, tmp_path):
    flags = ("--workers=2", f"--address={cluster.address}", "--restarts=0")
    code, errors = called(sys.executable, "launch", "ray", *words(tmp_path, "run", max_train_steps=9), *flags)
    assert code == 2, errors
    assert f"has smalti {OTHER}, not {version('smalti')}" in errors
    assert "install the same versions on all nodes" in errors
    assert not (tmp_path / "run").exists()


@only_whole("plugins/ray/tests/test_data_input.py::test_a_node_with_other_versions_is_refused")
def test_an_encoding_names_the_node_with_another_version(cluster, tmp_path):
    flags = ("--engine=ray", "--engine_cpus=2", f"--address={cluster.address}", f"--cache_dir={tmp_path}/cache")
    data = (f"--instance_data_dir={images_in(tmp_path / 'images', 4)}", "--model_family=gated", "--use_cpu")
    code, errors = called(sys.executable, "cache", "encode", *data, *flags)
    assert code == 2, errors
    assert f"has smalti {OTHER}, not {version('smalti')}" in errors
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@only_whole("plugins/ray/tests/test_data_input.py::test_a_node_with_other_versions_is_refused")
def test_a_cluster_with_another_python_is_named(cluster, other_python, tmp_path):
    python, theirs = other_python
    flags = ("--workers=1", f"--address={cluster.address}")
    code, errors = called(python, "launch", "ray", *words(tmp_path, "run", max_train_steps=9), *flags)
    assert code == 2, errors
    assert all(f"Python: {each}" in errors for each in (platform.python_version(), theirs)), errors
    assert "use the same Ray and Python on the cluster and here" in errors
    assert not (tmp_path / "run").exists()
