"""The syntax trees of files, each parsed once in a process: many rules of tests/meta look at all of them."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """That of a file of Python, for all who ask: not to be changed."""
    enabled = gc.isenabled()
    gc.disable()  # it would look three times as long through nodes, of which none is garbage, as the parser takes
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if enabled:
            gc.enable()


@cache
def nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, in the order of `ast.walk`."""
    return tuple(ast.walk(module))
