"""`make test` leaves out cases, never a promise: every test keeps some or names another one; `make test-whole` runs all."""

import ast
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from smalti.config.files import PREFIX
from support.whole import VARIABLE, some

LOOKING = {
    "tests/support/whole.py",
    "tests/conftest.py",  # hypothesis draws more examples
    "tests/support/compile_extensions.py",  # before pytest is installed
    "tests/meta/test_whole.py",
    "tests/bench/test_gpu_day.py",  # runs beside each other those that are kept
    "tests/bench/test_cluster_day.py",  # a job of SLURM, of minutes
    "plugins/ray/tests/test_launch_on_ray.py",  # a cluster of Ray, of minutes
    "tests/contracts/test_tutorials.py",  # executes as a reader does
    "plugins/diffusers/tests/test_families_page.py",  # compares declared cases with those that run
}
"""Files that do something else than `some` does."""


def test_cases_that_are_kept_run_in_their_order_and_the_others_with_them_in_the_whole():
    assert some("abcd", "c", "a", whole=False) == ["a", "c"]
    assert some("abcd", "c", "a", whole=True) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kept", [(), ("a", "x")])
def test_a_test_without_cases_or_with_a_misspelt_one_is_not_even_collected(kept, whole):
    with pytest.raises(ValueError, match="to keep"):
        some("abcd", *kept, whole=whole)


def paths(root: Path) -> list[Path]:
    return [*root.glob("tests/**/*.py"), *root.glob("plugins/*/tests/**/*.py")]


def test_no_file_leaves_out_more_than_cases(root):
    found = set()
    for path in paths(root):
        text = path.read_text(encoding="utf-8")
        if "whole import WHOLE" in text or VARIABLE in text:
            found.add(str(path.relative_to(root)))
    assert found == LOOKING


@cache
def keepers(path: Path) -> dict[str, str | None]:
    """The tests of a file, and of those that `make test` leaves out as a whole, the test that keeps the promise."""
    found: dict[str, str | None] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            [keeper] = [ast.literal_eval(each.args[0]) for each in calls if ast.unparse(each.func) == "only_whole"] or [None]
            found[node.name] = keeper
    return found


def test_a_test_that_is_left_out_names_one_that_is_not(root):
    texts = {path: path.read_text(encoding="utf-8") for path in paths(root) if path.name not in ("whole.py", "test_whole.py")}
    users = [path for path, text in texts.items() if "only_whole" in text]
    named = [keeper for path in users for keeper in keepers(path).values() if keeper is not None]
    assert sum(text.count("only_whole(") for text in texts.values()) == len(named) > 0, "it stands above tests only"
    for keeper in named:
        file, _, name = keeper.partition("::")
        tests = keepers(root / file)
        assert name in tests, f"{keeper}: no such test"
        assert tests[name] is None, f"{keeper} is left out itself"


def test_a_run_that_a_test_starts_does_not_take_the_variable_for_an_option():
    assert not VARIABLE.startswith(PREFIX)


def test_make_test_whole_runs_all_cases_and_make_test_those_that_are_kept(root, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "TEST_CASES=$TEST_CASES"\n')
    python.chmod(0o755)
    done = ("-o", ".venv/dev.done", "-o", ".venv/compiled.done")
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    for target, said in (("test", "TEST_CASES="), ("test-whole", "TEST_CASES=whole")):
        command = ["make", "--silent", "--no-print-directory", "-C", root, f"BIN={tmp_path}", *done, target]
        assert subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout == f"{said}\n"
