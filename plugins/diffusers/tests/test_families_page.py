"""docs/reference/families.md says of each family what tests compare, and of each other pipeline why it has no family."""

import ast
from importlib.metadata import version
from pathlib import Path

import compared
import pytest
from kinds import EVERY

from support import family_table
from support.whole import WHOLE

needs_pinned = pytest.mark.skipif(version("diffusers") != family_table.pinned(), reason="the page is for the pinned diffusers")


@needs_pinned
def test_the_page_is_up_to_date():
    assert family_table.PAGE.read_text(encoding="utf-8") == family_table.page(), "python tests/support/family_table.py"


def test_every_test_that_compares_is_on_the_page():
    texts = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")}
    declaring = {
        name
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each).startswith("compares(") for each in node.decorator_list)
    }
    assert declaring == {*family_table.TESTS}


def test_the_families_on_the_page_are_those_of_the_cases(request):
    """Of the tests that are collected with this one: all families in `make test-whole`, none but these otherwise."""
    found = {}
    for item in request.session.items:
        families = {compared.family_of(text) for text in named(item)}
        if families and item.path.parent == Path(__file__).parent:
            found.setdefault(f"{item.path.name}::{item.function.__name__}", set()).update(families)
    wrong = {}
    for test in {each.test for each in compared.DECLARED} & found.keys():
        declared = {each.family for each in compared.DECLARED if each.test == test}
        if (found[test] != declared) if WHOLE and not request.config.option.keyword else not found[test] <= declared:
            wrong[test] = found[test] ^ declared
    assert wrong == {}


def named(item) -> list[str]:
    """The kinds of pipelines, or families, among the parameters of a test."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    texts = [text for value in values for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)]
    return [text for text in texts if text in compared.NAMES or text in EVERY]
