"""What `make dist` builds and checks: it finds builds that differ, files that a wheel lacks, and commands that fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import distributions, installs

ROOT = Path(__file__).parents[2]


def test_a_package_built_twice_is_the_same_bytes_and_complete_and_a_change_is_found(tmp_path):
    seconds = distributions.commit_time()
    for name, umask in (("a", 0o022), ("b", 0o077)):
        distributions.build(ROOT / "plugins/toy", tmp_path / name, seconds=seconds, umask=umask)
    assert len([*(tmp_path / "a").iterdir()]) == 2
    assert distributions.differences(tmp_path / "a", tmp_path / "b") == []
    (wheel,) = (tmp_path / "b").glob("*.whl")
    lacking = set(distributions.missing(ROOT / "plugins/optimizers", wheel))
    assert {"smalti_optimizers/plugin.py", "LICENSE"} & lacking == {"smalti_optimizers/plugin.py"}
    wheel.write_bytes(wheel.read_bytes()[:-1])
    (tmp_path / "a" / "only-here").touch()
    assert distributions.differences(tmp_path / "a", tmp_path / "b") == ["only-here", wheel.name]


def test_a_package_that_does_not_build_is_told_with_what_hatchling_said(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[build-system]\nrequires = ["hatchling"]\n[project]\nname = "x"\n')
    with pytest.raises(subprocess.CalledProcessError) as raised:
        distributions.build(tmp_path, tmp_path / "made", seconds="1700000000")
    assert "version" in raised.value.stderr


def test_links_of_a_readme_lead_to_the_address_or_are_plain_text():
    text = "[guide](../../docs/lora.md#memory), [site](https://example.org), [below](#here)"
    folder = Path("plugins/toy")
    assert distributions.for_index(text, folder, "") == "guide, [site](https://example.org), [below](#here)"
    led = distributions.for_index(text, folder, "https://example.org/o/n")
    assert led == "[guide](https://example.org/o/n/blob/HEAD/docs/lora.md#memory), [site](https://example.org), [below](#here)"


def test_a_command_that_fails_or_says_something_else_fails_the_trial_with_its_words(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    command = ["python", "-c", "print('spoken'); raise SystemExit(3)"]
    assert installs.run(command, tmp_path, code=3, says="spoken") == "spoken\n"
    for wanted in ({}, {"code": 3, "says": "other"}):
        with pytest.raises(installs.TrialError, match=r"exit code 3, wanted[^Z]*spoken"):
            installs.run(command, tmp_path, **wanted)


def test_a_plugin_that_is_not_active_or_not_there_fails_the_trial():
    listed = {"name": "toy", "distribution": "smalti-toy", "state": "active"}
    installs._all_active(json.dumps({"plugins": [listed]}), {"smalti-toy"})
    for plugins, asked in (([listed], {"smalti-hub"}), ([{**listed, "state": "broken"}], {"smalti-toy"})):
        with pytest.raises(installs.TrialError):
            installs._all_active(json.dumps({"plugins": plugins}), asked)


def test_the_core_each_package_and_all_together_are_tried(tmp_path):
    names = [folder.name for folder in distributions.projects(ROOT) if folder.name != "core"]
    for name in names:
        (tmp_path / f"smalti_{name}-1.0.0-py3-none-any.whl").touch()
    planned = [trial.packages for trial in installs.trials(tmp_path)]
    assert planned[:2] == [("smalti",), ("smalti[usual]",)]
    alone = {package.partition("[")[0] for (package,) in planned[2:-1]}
    assert alone == {f"smalti-{name.replace('_', '-')}" for name in names}
    assert len(planned[-1]) == len(names) + 1


def test_what_only_the_core_answers_is_tried_without_other_packages_and_with_the_sets(tmp_path):
    for name in ("smalti-1.0.0", "smalti_hub-1.0.0"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    names = [[name for name, _ in installs.steps(trial, tmp_path, tmp_path)] for trial in installs.trials(tmp_path)]
    core, usual, hub, everything = map(set, names)
    assert {*installs.OF_THE_CORE, "train"} <= core & usual
    assert (core - hub, everything >= core) == ({*installs.OF_THE_CORE}, True)
    assert names[2][:3] == ["install", "help", "plugins"]
