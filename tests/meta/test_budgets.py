"""Files and functions stay small enough to be read in one pass."""

import ast
import re

import pytest

FILE_LINES = 500
FUNCTION_LINES = 60
SPECIAL = {"trainer.py": 200}
FORBIDDEN_NAMES = ("utils", "util", "helpers", "helper", "common", "manager", "misc")


@pytest.fixture(scope="module")
def sources(root):
    return [*sorted((root / "core" / "src").rglob("*.py")), *sorted(root.glob("plugins/*/src/**/*.py"))]


def test_no_file_is_longer_than_its_budget(sources):
    lengths = {path: len(path.read_text().splitlines()) for path in sources}
    assert {path.name: lines for path, lines in lengths.items() if lines > SPECIAL.get(path.name, FILE_LINES)} == {}


def test_no_function_is_longer_than_its_budget(sources):
    long = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long[f"{path.name}: {node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_is_for(sources):
    assert [str(path) for path in sources if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_module_is_named_after_nothing(sources):
    assert [str(path) for path in sources if path.stem in FORBIDDEN_NAMES] == []


def test_the_budgets_that_are_told_are_those_that_are_held(root):
    rules, design = (
        " ".join((root / page).read_text(encoding="utf-8").split()) for page in ("CONTRIBUTING.md", "docs/design.md")
    )
    numbers = (str(FILE_LINES), str(FUNCTION_LINES), str(SPECIAL["trainer.py"]))
    assert re.findall(r"at most (\d+) lines, a function (\d+), `trainer\.py` (\d+)", rules) == [numbers]
    told = re.findall(
        r"A file of (\d+) lines and a function of (\d+) fit into a head\. `trainer\.py` is under (\d+) lines", design
    )
    assert told == [numbers]
