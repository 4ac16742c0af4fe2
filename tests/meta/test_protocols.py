"""docs/reference/protocols.md has every protocol that a plugin may implement, as the code has it."""

import ast
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import smalti
from smalti import types
from smalti.hookspecs import HookSpecs
from smalti_testing.protocols import CHAPTERS, page
from support.sources import nodes, tree

NOT_FOR_PLUGINS = {
    "Display",  # the console's own
    "Named",
    "PlannedPasses",  # the loss
    "Quantile",
}
"""Protocols that only the core implements and uses. Any other belongs on the page."""

ALIASES = {"Part", "Progress"}
"""Names of functions' types and of literals, for which another room has a class of the same name."""

ADDRESSES = [address for chapter in CHAPTERS for address in (*chapter.classes, *chapter.optional, *chapter.given)]


@pytest.fixture(scope="module")
def made() -> str:
    """The page as the code has it."""
    return page()


def protocols(path: Path) -> list[str]:
    """The protocols that a file defines, but for private ones."""
    classes = [node for node in nodes(tree(path)) if isinstance(node, ast.ClassDef)]
    return [each.name for each in classes if "Protocol" in map(ast.unparse, each.bases) and not each.name.startswith("_")]


def test_the_page_is_up_to_date(root, made):
    assert (root / "docs/reference/protocols.md").read_text() == made, "smalti plugin reference > docs/reference/protocols.md"


def test_the_page_has_no_private_names(root):
    assert re.findall(r"(?<![\w.])_[A-Za-z]\w+", (root / "docs/reference/protocols.md").read_text()) == []


def test_every_protocol_of_the_core_is_on_the_page_or_the_cores_own(root):
    found = {name for path in (root / "core" / "src").rglob("*.py") for name in protocols(path)}
    shown = {address.partition(":")[2] for address in ADDRESSES}
    assert found - shown == NOT_FOR_PLUGINS
    assert len(shown) == len(ADDRESSES)


def test_every_record_that_a_plugin_registers_is_on_the_page():
    registered = {
        name
        for name in types.__all__
        if isinstance(value := getattr(types, name), type) and types.Registered in value.__bases__
    }
    assert "FamilyEntry" in registered
    assert registered <= {address.partition(":")[2] for address in ADDRESSES}


def test_every_method_of_a_protocol_is_on_the_page(made):
    """The page is made from the source without importing it; here the classes are imported."""
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^###? |\Z)", made, flags=re.MULTILINE | re.DOTALL))
    for kind in (resolve_name(address) for address in ADDRESSES):
        if getattr(kind, "_is_protocol", False):
            members = {name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)}
            shown = re.findall(r"^#### `(\w+)", sections[kind.__name__], flags=re.MULTILINE)
            assert set(shown) == {name for name in members if not name.startswith("_")}, kind


def classes_named(owner, sections):
    """The classes of smalti that the annotations of a class name, found by importing it."""
    functions = [each.fget if isinstance(each, property) else each for each in vars(owner).values()]
    hints = [getattr(owner, "__annotations__", {})]
    hints += [each.__annotations__ for each in functions if inspect.isfunction(each) and not each.__name__.startswith("_")]
    words = {word for found in hints for hint in found.values() for word in re.findall(r"[A-Za-z_]\w*", str(hint))}
    return {word for word in words if word in sections}


def test_every_class_in_the_signature_of_a_hook_or_of_a_documented_class_is_on_the_page(root, made):
    """Here the classes are imported; the page is made from the source."""
    defined = {
        node.name
        for path in (root / "core" / "src").rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    shown = {*re.findall(r"^### `(\w+)`", made, flags=re.MULTILINE), *ALIASES}
    assert {"RunState", "RunInfo", "StepResult", "GpuFault", "Config", "Loaded", "ContextPlan", "DatasetSpec"} <= shown
    for owner in (HookSpecs, *(resolve_name(address) for address in ADDRESSES)):
        assert classes_named(owner, defined) <= shown, owner


def test_a_base_gives_the_defaults_that_the_page_says(made):
    for chapter in CHAPTERS:
        for base in chapter.bases:
            kind = resolve_name(base)
            for method in re.findall(rf"^\| `(\w+)` \| default in `{kind.__name__}` \|", made, flags=re.MULTILINE):
                assert callable(getattr(kind, method)), (base, method)


@pytest.mark.parametrize(
    "page", ["docs/hooks.md", "docs/reference/hooks.md", "docs/writing-a-plugin.md", "core/src/smalti/hookspecs.py"]
)
def test_authors_of_plugins_are_sent_to_public_modules_only(page, root):
    """The faces are `smalti` and its rooms, and `smalti.hookspecs`, which the page "What is public" has too."""
    text = re.sub(r'"smalti(?:\.\w+)+"', "", (root / page).read_text())  # the names of loggers
    private = []
    for name in sorted({*re.findall(r"\bsmalti\.\w+(?:\.\w+)?", text)} - {"smalti.plugins", "smalti.hookspecs"}):
        _, room, *rest = name.split(".")
        face = root / "core" / "src" / "smalti" / room / "__init__.pyi"
        names = [f" {each} as {each}" in face.read_text() for each in rest] if face.is_file() else [hasattr(smalti, room)]
        private += [name] if not all(names) else []
    assert private == []
