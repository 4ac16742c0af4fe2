"""The Makefile: ARGS reach every command that they are for, and pip prints errors only."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(*words):
    command = ["make", "--no-print-directory", "-C", ROOT, f"BIN={Path(sys.executable).parent}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_both_trainings_of_the_demo_get_the_arguments():
    lines = make("--dry-run", "demo", "ARGS=--mixed_precision=no").splitlines()
    trainings = [line.split() for line in lines if "smalti train" in line]
    assert ["--mixed_precision=no" in words for words in trainings] == [True, True]


def test_pip_says_what_fails_and_nothing_of_folders_that_are_not_there(tmp_path):
    pip = make("--eval", "show-pip: ; @echo $(PIP)", "show-pip").partition("/python ")[2].split()
    words = ["--no-index", f"--find-links={tmp_path / 'absent'}", "smalti-is-not-here"]
    done = subprocess.run([sys.executable, *pip, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No matching distribution found for smalti-is-not-here" in done.stderr
    assert "WARNING" not in done.stdout + done.stderr
