"""`smalti plugin new`: what it prints, what it writes, and the names and folders that it refuses."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from shlex import quote

import pytest

from smalti_testing.new_plugin import KINDS
from support.commands import commands
from support.whole import only_whole

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(capsys, *words: str) -> tuple[int, str, str]:
    return commands(capsys, "plugin")("new", *words)


def test_every_kind_has_templates_and_the_other_way_round():
    folders = {each.name for each in (files("smalti_testing") / "templates").iterdir()}
    assert folders == {*KINDS, "every"}


def test_it_says_what_it_wrote_and_what_to_type_next(capsys, folder):
    code, out, err = new(capsys, "Red-Pebble", "--kind", "family")
    assert (code, err) == (0, "")
    assert out.startswith("created smalti-red-pebble: the plugin 'red_pebble', a model family\n  README.md\n")
    assert "  cd smalti-red-pebble\n  pip install -e '.[test]'\n  pytest\n  smalti train --model_family=red_pebble " in out
    assert 'red_pebble = "smalti_red_pebble:plugin"' in (folder / "smalti-red-pebble/pyproject.toml").read_text()
    assert len((folder / "smalti-red-pebble/README.md").read_text().splitlines()) <= 12


def test_json_names_folder_files_and_commands(capsys, folder):
    code, out, _ = new(capsys, "pebble", "--kind=observer", "--to=deep/er", "--json")
    said = json.loads(out)
    assert code == 0
    assert (said["name"], said["kind"], said["folder"]) == ("pebble", "observer", str(folder / "deep/er"))
    found = sorted(str(path.relative_to(folder / "deep/er")) for path in (folder / "deep/er").rglob("*") if path.is_file())
    assert said["files"] == found
    assert said["next"][0] == "cd deep/er"


def test_the_package_that_the_trial_needs_comes_first(capsys, monkeypatch):
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    first = {
        kind: json.loads(new(capsys, f"my-{kind}", f"--kind={kind}", "--json")[1])["next"][0] for kind in ("family", "observer")
    }
    assert first == {"family": "cd smalti-my-family", "observer": f"pip install {quote(str(ROOT / 'plugins/toy'))}"}


def test_without_the_package_its_commands_name_it(capsys, monkeypatch):
    monkeypatch.setenv("SMALTI_WITHOUT", "testing")
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    code, _, errors = commands(capsys)("plugin", "new", "pebble", "--kind=family")
    assert (code, f"fix: pip install {quote(str(ROOT / 'plugins/testing'))}\n" in errors) == (4, True)


def test_it_needs_no_torch(folder):
    code = "import sys\nfrom smalti.cli.entry import main\ntry: main(['plugin', 'new', 'pebble', '--kind=strategy'])\n"
    code += "except SystemExit as left: assert left.code == 0\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


NAMES = {
    "1x": "a letter first",
    "hello world": "hello-world",
    "größe": "gr-e",
    "a" * 25: "24 characters at most",
    "trailing-": "trailing",
    "smalti-pebble": "leave the prefix out: pebble",
    "toy": "my_toy",
    "testing": "smalti-testing",
    "flux": "my_flux",
    "fsdp2": "my_fsdp2",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_cannot_be_used_or_is_taken_is_refused(capsys, folder, name):
    code, out, err = new(capsys, name, "--kind", "family")
    assert (code, out) == (2, "")
    assert "fix: " in err
    assert NAMES[name] in err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("optimizer", "adamw"), ("storage", "local"), ("storage", "aws"), ("metadata", "parquet"), ("command", "train")),
        ("format", "dcp"),
    ],
)
def test_a_name_that_is_registered_already_is_refused(capsys, kind, name):
    assert new(capsys, name, "--kind", kind)[0] == 2
    assert new(capsys, name, "--kind", "observer")[0] == 0


def test_a_folder_that_exists_is_left_alone(capsys, folder):
    (folder / "smalti-pebble").mkdir()
    code, _, err = new(capsys, "pebble", "--kind", "family")
    assert (code, list((folder / "smalti-pebble").iterdir())) == (2, [])
    assert "--to=FOLDER" in err


def test_a_folder_that_cannot_be_made_is_told_with_the_reason(capsys, folder):
    (folder / "file").touch()
    code, _, err = new(capsys, "pebble", "--kind", "family", "--to", "file/below")
    assert code == 2
    assert "file/below: Not a directory" in err


@pytest.mark.parametrize("words", [("pebble",), ("pebble", "--kind", "fammily"), ("--kind", "family")])
def test_what_is_missing_or_unknown_is_a_usage_error(capsys, words):
    assert new(capsys, *words)[0] == 2


@only_whole("tests/e2e/test_plugin_new.py::test_the_code_is_formatted_and_sound_whatever_the_name")
def test_the_types_of_what_it_writes_are_complete(capsys, folder):
    """With the cache of `make lint`, which in CI has checked the core before this test begins."""
    for kind in KINDS:
        assert new(capsys, f"my-{kind}", "--kind", kind, "--to", str(folder / kind))[0] == 0
    paths = (*(f"{kind}/src" for kind in KINDS), str(ROOT / "core" / "src"), ".")
    settings = ("--strict", "--namespace-packages", "--explicit-package-bases", "--config-file", ROOT / "pyproject.toml")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "--cache-dir", ROOT / ".mypy_cache", *KINDS],
        env={**os.environ, "MYPYPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
