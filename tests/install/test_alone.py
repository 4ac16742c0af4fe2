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
import gc, importlib, json, os, pkgutil, sys, traceback
from contextlib import suppress
import accelerate, click, peft, pluggy, pyarrow, pydantic, tomlkit, torch, transformers

gc.freeze()

def look(paths, packages):
    sys.path[:0] = paths
    importlib.invalidate_caches()
    from smalti.cli import main
    for words in (["plugins", "--json"], ["train", "--help-all"]):
        with suppress(SystemExit):
            main(words)
    for name in packages:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    print()
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules if name.startswith("smalti")})))

for line in sys.stdin:
    output, *order = json.loads(line)
    if (process := os.fork()) == 0:
        file = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        try:
            look(*order)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
"""A process without packages of this project, whose imports of others are paid once. For each line of its input it forks one
that shows the list of plugins and the help of all options and imports every module. The last line of what that prints says of
which packages modules were loaded.
"""


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


@pytest.fixture(scope="module")
def bare(others) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LOOK],
        env=os.environ | {"PYTHONPATH": str(others)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("distribution", FOLDERS)
def test_a_package_needs_no_other_than_it_declares(distribution, bare, tmp_path):
    paths, packages = [tmp_path], {}
    for name in dict.fromkeys(needs(distribution)):
        paths.append(FOLDERS[name] / "src")
        packages[name] = [file.parent.name for file in FOLDERS[name].glob("src/*/__init__.py")]
        (info,) = Path(getsitepackages()[0]).glob(f"{name.replace('-', '_')}-*.dist-info")
        (tmp_path / info.name).symlink_to(info)
    output = tmp_path / "output"
    bare.stdin.write(json.dumps([str(output), [*map(str, paths)], packages[distribution]]) + "\n")
    bare.stdin.flush()
    code = bare.stdout.readline()
    said = output.read_text()
    assert code == "0\n", said
    plugins, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    assert {one["name"]: one["reason"] for one in plugins["plugins"] if one["state"] != "active"} == {}
    assert "--output_dir" in said
    assert set(json.loads(said.splitlines()[-1])) <= {name for each in packages.values() for name in each}
