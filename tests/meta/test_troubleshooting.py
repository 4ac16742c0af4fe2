"""The page on troubleshooting quotes messages as the code has them."""

import ast
import re
from pathlib import Path

import pytest

from support.sources import nodes, tree

_PLACE = "..."


@pytest.fixture(scope="module")
def messages(root: Path) -> list[str]:
    """Every text in the code of the packages, with `...` for what is filled in."""
    paths = [*(root / "core" / "src").rglob("*.py"), *root.glob("plugins/*/src/**/*.py")]
    return [text for path in paths for text in texts(tree(path))]


def texts(module: ast.Module) -> list[str]:
    found = []
    for node in nodes(module):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else _PLACE for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def quoted(root: Path) -> list[str]:
    """The first code span of the first cell of each row below a heading `message`."""
    page = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return [match[1] for line in rows if (match := re.match(r"\| `([^`]+)`", line))]


def bare(text: str) -> str:
    """Without quotation marks around what is filled in, and with one mark for several places side by side."""
    return re.sub(r"\.{3}(\s?\.{3})*", _PLACE, re.sub(r"'\.{3}'", _PLACE, text)).lower()


def test_every_message_that_is_quoted_is_one_of_the_code(root, messages):
    quotes, there = quoted(root), "\n".join(map(bare, messages))
    assert len(quotes) > 30
    assert [quote for quote in quotes if bare(quote).removeprefix(_PLACE).strip() not in there] == []
