"""docs/reference/families.md says of each family what tests compare, and of each other pipeline why it has no family."""

import ast
from pathlib import Path

import compared
import pytest

from support import family_table
from support.dependencies import is_tested
from support.whole import WHOLE

needs_pinned = pytest.mark.skipif(not is_tested("diffusers"), reason="the page is for the pinned diffusers")


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


def test_the_cases_that_are_declared_are_those_that_run(request):
    """Of the tests that are collected with this one: all cases in `make test-whole`, some of them otherwise."""
    declared = {}
    for each in compared.DECLARED:
        declared.setdefault(each.test, set()).add(each.values)
    wrong, runs = {}, {}
    for item in request.session.items:
        test = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if test in declared and item.path.parent == Path(__file__).parent and hasattr(item, "callspec"):
            found = {value for value in item.callspec.params.values() if isinstance(value, str)}
            if found:  # else its parameters are no cases of families
                runs.setdefault(test, []).append(next((case for case in declared[test] if found.issuperset(case)), item.name))
    for test, cases in runs.items():
        complete = WHOLE and not request.config.option.keyword
        if not declared[test].issuperset(cases) or (complete and declared[test] != {*cases}):
            wrong[test] = declared[test] ^ {*cases}
    assert wrong == {}
