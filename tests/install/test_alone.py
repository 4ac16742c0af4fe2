"""Each package works with nothing but the core and the packages that it declares."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from site import getsitepackages

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = {
    tomllib.loads(file.read_text())["project"]["name"]: file.parent
    for file in (ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
}
LOOK = """
import importlib, json, pkgutil, sys
from contextlib import suppress
from smalti.cli import main
for words in (["plugins", "--json"], ["train", "--help-all"]):
    with suppress(SystemExit):
        main(words)
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules if name.startswith("smalti")})))
"""
"""The list of plugins, the help of all options, then every module; the last line says of which packages modules were loaded."""


def needs(distribution: str) -> Iterator[str]:
    """The packages of this project with which one has to be installed, itself included, without its extras."""
    yield distribution
    for text in tomllib.loads((FOLDERS[distribution] / "pyproject.toml").read_text())["project"]["dependencies"]:
        if (name := Requirement(text).name) in FOLDERS:
            yield from needs(name)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Everything that is installed, but for the packages of this project."""
    folder = tmp_path_factory.mktemp("others")
    for entry in Path(getsitepackages()[0]).iterdir():
        if not entry.name.startswith("smalti") and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.parametrize("distribution", FOLDERS)
def test_a_package_needs_no_other_than_it_declares(distribution, others, tmp_path):
    paths, packages = [tmp_path, others], {}
    for name in dict.fromkeys(needs(distribution)):
        paths.append(FOLDERS[name] / "src")
        packages[name] = [file.parent.name for file in FOLDERS[name].glob("src/*/__init__.py")]
        (info,) = Path(getsitepackages()[0]).glob(f"{name.replace('-', '_')}-*.dist-info")
        (tmp_path / info.name).symlink_to(info)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-S", "-c", LOOK, *packages[distribution]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plugins, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert {one["name"]: one["reason"] for one in plugins["plugins"] if one["state"] != "active"} == {}
    assert "--output_dir" in done.stdout
    assert set(json.loads(done.stdout.splitlines()[-1])) <= {name for each in packages.values() for name in each}
