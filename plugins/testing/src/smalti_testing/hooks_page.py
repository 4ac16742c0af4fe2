"""The reference page of the hooks, generated from their docstrings and signatures. Imports no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

from smalti.config import PLUGINS
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins
from smalti_testing.protocols import documented

_INTRODUCTION = """\
# Every hook

For authors of plugins: what each hook is for, when it is called, what it takes and returns, an example that is a complete
plugin, who calls it, and the plugins of this project that use it. When to use which, and the rules for all, are in
[Hooks](../hooks.md).
This page is generated from the source: `smalti plugin reference hooks > docs/reference/hooks.md`.
"""
_SECTION = re.compile(r"^    # --- (.+?) -+$", re.MULTILINE)
_CALLS = ("decide", "gather", "notify", "call_one", "ask_each", "notify_each", "lines_of_each", "_ask")
"""The functions by which the core calls a hook, given as `HookSpecs.NAME`."""
_EXAMPLE = re.compile(r"^### (\w+)\n\n(```python\n.*?^```)$", re.MULTILINE | re.DOTALL)


def hooks_page(plugins: Plugins) -> str:
    """The whole page, in Markdown; of `plugins`, those of this project are named as users."""
    return "\n".join(_lines(plugins))


@cache
def examples() -> dict[str, str]:
    """A block of Python in Markdown by hook: a plugin that implements the hook, as its name `plugin`."""
    return dict(_EXAMPLE.findall((files("smalti_testing") / "hook_examples.md").read_text(encoding="utf-8")))


def _lines(plugins: Plugins) -> Iterator[str]:
    yield _INTRODUCTION
    for title, hooks in _sections():
        yield from (f"## {title[:1].upper()}{title[1:]}", "")
        for hook in hooks:
            yield from _hook(hook, plugins)


def _sections() -> Iterator[tuple[str, list[ast.FunctionDef]]]:
    """The hooks below each comment that heads some of them."""
    source = (files("smalti") / "hookspecs.py").read_text(encoding="utf-8")
    [specs] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == HookSpecs.__name__]
    hooks = [node for node in specs.body if isinstance(node, ast.FunctionDef)]
    starts = [(source.count("\n", 0, found.start()) + 1, found[1]) for found in _SECTION.finditer(source)]
    ends = [line for line, _ in starts[1:]] + [source.count("\n") + 1]
    for (start, title), end in zip(starts, ends, strict=True):
        yield title, [hook for hook in hooks if start < hook.lineno < end]


def _hook(hook: ast.FunctionDef, plugins: Plugins) -> Iterator[str]:
    arguments = hook.args.args[1:]
    kind, _, about = (ast.get_docstring(hook) or "").partition(": ")
    first, _, rest = about.partition("\n")
    yield from (f"### `{hook.name}({', '.join(each.arg for each in arguments)})`", "")
    takes = [f"`{each.arg}` {_typed(each.annotation)}" for each in arguments]
    yield " · ".join([f"*{kind}*", *takes, *([] if kind.startswith("notify") else [f"returns {_typed(hook.returns)}"])])
    yield from ("", f"{first[:1].upper()}{first[1:]}", *rest.splitlines(), "", examples()[hook.name], "")
    yield f"Called in {', '.join(f'`{file}`' for file in callers(hook.name))}."
    yield from (f"Shipped users: {', '.join(shipped_users(hook.name, plugins))}.", "")


def callers(hook: str) -> list[str]:
    """The files that call a hook, below their packages: those of the core, or of packages where only they do."""
    packages = {package.distribution.replace("-", "_") for package in PLUGINS.values()}
    return _called_in("smalti").get(hook) or [file for name in sorted(packages) for file in _called_in(name).get(hook, [])]


@cache
def _called_in(package: str) -> dict[str, list[str]]:
    """The files of a package that call hooks, by hook."""
    base, found = Path(str(files(package))), dict[str, list[str]]()
    for path in sorted(base.rglob("*.py")):
        if HookSpecs.__name__ not in (source := path.read_text(encoding="utf-8")):
            continue
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if getattr(call.func, "attr", getattr(call.func, "id", "")) in _CALLS:
                for each in call.args:
                    if isinstance(each, ast.Attribute) and ast.unparse(each.value) == HookSpecs.__name__:
                        file = str(path.relative_to(base if package == "smalti" else base.parent))
                        found.setdefault(each.attr, []).append(file)
    return {hook: sorted(set(paths)) for hook, paths in found.items()}


def shipped_users(hook: str, plugins: Plugins) -> list[str]:
    """The plugins of this project that implement a hook, sorted."""
    own = {"smalti", *(package.distribution for package in PLUGINS.values())}
    names = plugins.implementers(getattr(HookSpecs, hook))
    return sorted(name for name in names if plugins.infos[name].distribution in own)


def _typed(annotation: ast.expr | None) -> str:
    """A type, with a link to the first class in it that has a section among the protocols."""
    if annotation is None:
        return ""
    text = f"`{ast.unparse(annotation)}`"
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id in _classes()]
    return f"[{text}](protocols.md#{names[0].lower()})" if names else text


@cache
def _classes() -> frozenset[str]:
    return frozenset(address.partition(":")[2] for address in documented())
