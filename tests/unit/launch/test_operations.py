"""The page on operations: its table of exit codes is that of the code."""

import ast
import inspect
import re

from smalti import errors
from smalti.errors import ExitCode
from support import pages

PAGE = (pages.DOCS / "operations.md").read_text(encoding="utf-8")


def code_rows() -> list[str]:
    """The table as the docstrings of `ExitCode` have it."""
    [kind] = [node for node in ast.parse(inspect.getsource(errors)).body if getattr(node, "name", "") == "ExitCode"]
    told = [node.value.value for node in kind.body[1:] if isinstance(node, ast.Expr)]
    rows = []
    for code, text in zip(ExitCode, told, strict=True):
        meaning, saved, again = (line.strip().rstrip(".") for line in re.split(r"\n *(?:Saved|Again):", text.strip()))
        rows.append(f"| {int(code)} | {meaning} | {saved} | {again} |")
    return rows


def test_the_table_of_exit_codes_is_that_of_the_code():
    assert [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)] == code_rows()
