"""Files and functions stay small enough to be read in one pass."""

import ast
import re
from pathlib import Path

import pytest

from smalti.config import GROUPS, Schema
from support.sources import nodes, tree

FILE_LINES = 500
FUNCTION_LINES = 60
SPECIAL = {"trainer.py": 200}
CORE_LINES = 19_512
"""Lines of code of the core, which may only fall: lower the number with the code."""
KERNEL_LINES = 4_268
KERNEL = ("errors.py", "hookspecs.py", "types", "plugins", "config", "system")
OPTIONS = 89
"""Options of the core, which may only become fewer: what is computed, or is a part of another value, needs none."""
BASIC_OPTIONS = 42
"""Those of them that the short help shows."""
SLACK = 50
"""How far below its number the core may be."""
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
        for node in nodes(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long[f"{path.name}: {node.name}"] = lines
    assert long == {}


def lines_of_code(path: Path) -> int:
    """Without blank lines, comments, docstrings and the texts below attributes."""
    text = path.read_text(encoding="utf-8")
    texts = {
        line
        for node in nodes(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in texts)


@pytest.mark.parametrize(("limit", "names"), [(CORE_LINES, ("",)), (KERNEL_LINES, KERNEL)], ids=["core", "kernel"])
def test_the_core_only_shrinks(root, limit, names):
    base = root / "core" / "src" / "smalti"
    files = {path for name in names for path in ([base / name] if name.endswith(".py") else (base / name).rglob("*.py"))}
    assert limit - SLACK <= sum(map(lines_of_code, files)) <= limit


def test_the_options_of_the_core_only_become_fewer():
    options = [option for group in GROUPS for option in Schema((group,)).options.values()]
    assert (len(options), sum(option.level == "basic" for option in options)) == (OPTIONS, BASIC_OPTIONS)


def test_every_module_says_what_it_is_for(sources):
    assert [str(path) for path in sources if not ast.get_docstring(tree(path))] == []


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
