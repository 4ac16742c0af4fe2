"""The Makefile: ARGS reach every command that they are for, and pip prints errors only."""

import json
import re
import subprocess
import sys
from pathlib import Path

import quick

ROOT = Path(__file__).parents[2]


def make(*words):
    command = ["make", "--no-print-directory", "-C", ROOT, f"BIN={Path(sys.executable).parent}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_both_trainings_of_the_demo_get_the_arguments():
    lines = make("--dry-run", "demo", "ARGS=--mixed_precision=no").splitlines()
    trainings = [line.split() for line in lines if "smalti train" in line]
    assert ["--mixed_precision=no" in words for words in trainings] == [True, True]


def test_the_demo_installs_what_its_commands_need():
    called = {tuple(words.split()[:2]) for words in re.findall(r"smalti ([a-z ]+)", make("--dry-run", "demo"))}
    installed = re.findall(r"^-e \./plugins/(\w+)", (ROOT / "requirements-demo.txt").read_text(), flags=re.MULTILINE)
    packages = json.loads((ROOT / "core/src/smalti/config/known_packages.json").read_text())
    absent = [command for each in packages if each["plugin"] not in installed for command in each.get("commands", ())]
    assert [command for command in absent if tuple(command.split()) in called] == []
    assert ("checkpoint", "inspect") in called


def test_pip_says_what_fails_and_nothing_of_folders_that_are_not_there(tmp_path):
    pip = make("--eval", "show-pip: ; @echo $(PIP)", "show-pip").partition("/python ")[2].split()
    words = ["--no-index", f"--find-links={tmp_path / 'absent'}", "smalti-is-not-here"]
    done = subprocess.run([sys.executable, *pip, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No matching distribution found for smalti-is-not-here" in done.stderr
    assert "WARNING" not in done.stdout + done.stderr


def test_make_quick_looks_at_what_is_there_in_the_words_of_the_page():
    files = {asked: where for asked, where, _ in quick.ROWS}
    assert [where for where in files.values() if not (ROOT / where).exists()] == []
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## What it has to do")[2].partition("\n## ")[0]
    table = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in section.splitlines() if line.startswith("|")]
    for asked, where in table[2:]:
        assert files[asked.replace("`", "")] in (where, ""), asked
    assert "tests/quick.py" in make("--dry-run", "quick")
